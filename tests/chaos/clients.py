"""Load on a service while a block of a test runs, and external workers that join it."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import httpx

from multiworld_serving.server.supervisor.programs import PROGRAM
from multiworld_serving.testing.load import clients as load
from multiworld_serving.testing.load.clients import Load
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.load.requests import ReferenceRequest
from multiworld_serving.testing.local_service import LocalService
from tests.nursery import Process, fork_program
from tests.services import TOKEN
from tests.waiting import wait_until


@contextmanager
def run_load(service: LocalService, *, clients: int | None = None) -> Iterator[Load]:
    """Send one photo, for which any answer counts as correct, while the block runs, at least once; the result is complete after it.

    Args:
        clients: number of closed-loop clients, which use all cores; by default 20 requests per
            second in an open loop, which leaves CPU time for starting workers.
    """
    rate_hz = None if clients else 20.0
    with load.run_load(service.url, [ReferenceRequest(photo())], clients=clients or 0, rate_hz=rate_hz) as total:
        yield total
        wait_until(lambda: total.samples)  # the block may have been shorter than the time to the first request


def assert_nothing_lost(service: LocalService, total: Load) -> None:
    assert total.samples
    assert not total.failed, total.failed[:3]
    assert service.metric("multiworld_duplicate_answers_total") == 0
    assert service.metric("multiworld_requests_lost_total") == 0


def answers(service: LocalService, count: int = 3) -> list[int]:
    """The statuses of this many sequential requests."""
    headers = {"content-type": "image/jpeg"}
    sent = (httpx.post(f"{service.url}/predict", content=photo(), headers=headers, timeout=120) for _ in range(count))
    return [response.status_code for response in sent]


@contextmanager
def external_worker(
    *leaders: str,
    name: str,
    fault: str | None = None,
    token: str = TOKEN,
    options: Sequence[str] = (),
    stderr: IO[str] | None = None,
    in_namespace: bool = False,
) -> Iterator[Process]:
    """A worker process that joins these leaders, healthy or with a fault of `tests.chaos.faulty_worker`.

    Args:
        in_namespace: start it in the network namespace of this thread.
    """
    joins = [part for leader in leaders for part in ("--leader", leader)]
    arguments = ["worker", *joins, "--name", name, "--threads", "1", *options]
    own: dict[str, Any] = {"MULTIWORLD_TOKEN": token, "MULTIWORLD_HEARTBEAT_TIMEOUT_S": "10"}
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(os.devnull, "w")) if stderr is None else stderr
        worker: Process
        if in_namespace:
            worker = subprocess.Popen([*PROGRAM, *arguments], env={**os.environ, **own}, stderr=log)
        elif fault is None:
            worker = fork_program(arguments, log.fileno(), **own)
        else:
            call = "tests.chaos.faulty_worker:run_faulty"
            worker = fork_program([fault, *arguments], log.fileno(), call=call, **own)
    try:
        yield worker
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.terminate()
        try:
            worker.wait(60)
        finally:
            worker.kill()
