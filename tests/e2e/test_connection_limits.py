"""Clients of a real service that open more connections than it has file descriptors, and clients that come while it stops."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from multiworld_serving.server.supervisor.programs import PROGRAM
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService, metric_sum
from tests.services import small_service
from tests.waiting import wait_for_more, wait_until

DESCRIPTORS = 256
IMAGE = {"image": photo()}


def _start_with_few_descriptors(arguments: Sequence[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh", *PROGRAM, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def test_more_idle_connections_than_descriptors_fail_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalService, "start_program", staticmethod(_start_with_few_descriptors))
    with small_service(frontends=2) as service, ExitStack() as connections:
        client = connections.enter_context(httpx.Client(base_url=service.url, timeout=60))
        for _ in range(30):
            for address in (service.url, service.metrics_url):
                url = httpx.URL(address)
                for _ in range(20):
                    connections.enter_context(socket.create_connection((url.host, url.port or 80)))
            assert client.post("/predict", files=IMAGE).status_code == 200
            assert httpx.post(f"{service.url}/predict", files=IMAGE, timeout=60).status_code == 200
        metrics = httpx.get(service.metrics_url, timeout=60).text
        assert metric_sum(metrics, "multiworld_frontend_restarts_total") == 0
        assert service.stop() == 0


def test_new_connections_are_refused_and_no_request_is_lost_when_the_service_stops() -> None:
    """Clients send requests one after the other, each on a connection of its own, from before the stop until after it. One is idle."""
    with small_service(frontends=2) as service, ExitStack() as connections:
        client = connections.enter_context(httpx.Client(base_url=service.url, timeout=60))
        assert client.get("/healthz").status_code == 200
        ends: list[str] = []
        stopped = threading.Event()

        def ask() -> None:
            while not stopped.is_set():
                try:
                    answer = httpx.post(f"{service.url}/predict", files=IMAGE, timeout=60)
                    ends.append(f"{answer.status_code} {answer.json().get('reason', '')}".strip())
                except httpx.ConnectError:
                    ends.append("refused")
                    time.sleep(0.01)
                except httpx.HTTPError as error:
                    ends.append(repr(error))

        with ThreadPoolExecutor() as threads:
            asking = [threads.submit(ask) for _ in range(4)]
            wait_for_more(ends, 20)
            os.kill(service.pid, signal.SIGTERM)
            wait_until(lambda: "refused" in ends)
            assert service.stop() == 0
            stopped.set()
        for each in asking:
            each.result()
        assert set(ends) == {"200", "refused"}
