"""A reader of the log that stops reading, with the log of all requests."""

import os
import signal

import httpx

from tests.services import small_service
from tests.waiting import wait_until


def test_service_answers_and_restarts_workers_while_nobody_reads_its_log() -> None:
    with small_service(access_log=True) as service, httpx.Client(base_url=service.url, timeout=30) as client:
        (killed,) = service.worker_pids().values()
        with service._changed:  # the reader waits for it
            for _ in range(2000):
                assert client.get("/healthz").status_code == 200
            os.kill(killed, signal.SIGKILL)

            def is_replaced() -> bool:
                worker = service.status()["stages"][0]["replicas"][0]
                return bool(worker["state"] == "ready" and worker["pid"] != killed)

            wait_until(is_replaced)

        def dropped() -> set[object]:
            """The processes that say so with a later line, when the reader has made room for it."""
            assert client.get("/healthz").status_code == 200
            return {line["process"] for line in service.lines if "dropped lines=" in line.message}

        wait_until(dropped)
        assert dropped() == {"frontend-0"}
