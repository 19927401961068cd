"""HTTP in two processes: the same responses from both; a frontend that dies or freezes affects only its own connections."""

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from multiworld_serving.cli.main import main
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService
from tests.chaos.clients import answers, run_load
from tests.services import small_service

pytestmark = pytest.mark.timeout(300)
WAIT_S = 60.0
PHOTO = photo()


@pytest.fixture(scope="module")
def service() -> Iterator[LocalService]:
    with small_service(stages=2, frontends=2, heartbeat_timeout_s=3, hang_timeout_s=30) as running:
        for name in ("frontend-0", "frontend-1"):
            wait_until_serving(running, name, 0)
        yield running
        assert running.stop() == 0


def pids(service: LocalService) -> dict[str, int]:
    """Pids of the frontends that were started last, by name."""
    return {f"frontend-{slot}": pid for slot, pid in service.child_pids("frontend").items()}


@contextlib.contextmanager
def client_of(service: LocalService, name: str) -> Iterator[httpx.Client]:
    """A client that is connected to this frontend."""
    others = [pid for each, pid in pids(service).items() if each != name]
    with httpx.Client(base_url=service.url, timeout=60.0) as client:
        with frozen(others):  # so that they accept no connection
            assert client.get("/healthz").status_code == 200
        yield client


def ask(client: httpx.Client, image: bytes = PHOTO) -> httpx.Response:
    return client.post("/predict", content=image, headers={"content-type": "image/jpeg"})


@contextlib.contextmanager
def frozen(processes: Collection[int]) -> Iterator[None]:
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)


def wait_until_serving(service: LocalService, name: str, since: int) -> None:
    service.wait_for(lambda line: line.message.startswith(f"{name} serves"), WAIT_S, after=since)


def becomes(read: Callable[[], object], expected: object) -> None:
    """Wait until a value is as expected: metrics follow the response."""
    deadline_s = time.monotonic() + WAIT_S
    while (found := read()) != expected:
        assert time.monotonic() < deadline_s, found
        time.sleep(0.05)


def test_any_frontend_serves_status_and_metrics_of_all_processes(service: LocalService) -> None:
    for name in ("frontend-0", "frontend-1"):
        with client_of(service, name) as client:
            assert client.get("/readyz").json()["ready"] is True
            assert client.get("/nothing").json()["reason"] == "not_found"
            assert client.get("/predict").headers["allow"] == "POST"
            assert client.get("/", headers={"accept": "text/html"}).headers["content-type"].startswith("text/html")
            status = client.get("/status").json()
            assert [leader["state"] for leader in status["leaders"]] == ["ready"]
            assert [frontend["name"] for frontend in status["frontends"]] == ["frontend-0", "frontend-1"]
            text = client.get("/metrics").text
            assert all(f'process="{each}"' in text for each in ("leader-0", "frontend-0", "frontend-1", "supervisor"))
            with client.stream("GET", "/events") as events:
                assert next(line for line in events.iter_lines() if line.startswith("data:"))


def test_requests_are_counted_once_on_any_frontend(service: LocalService) -> None:
    def counted() -> tuple[float, float]:
        return (
            service.metric("multiworld_requests_total", protocol="predict", code="200"),
            service.metric("multiworld_requests_total", protocol="predict", reason="invalid_image"),
        )

    before = counted()
    for name in ("frontend-0", "frontend-1"):
        with client_of(service, name) as client:
            assert ask(client).status_code == 200
            bad = ask(client, b"no image")
            assert (bad.status_code, bad.json()["reason"]) == (422, "invalid_image")
    becomes(counted, (before[0] + 2, before[1] + 2))
    becomes(lambda: service.metric("multiworld_requests_in_flight"), 0)


def test_request_is_cancelled_when_the_client_disconnects(service: LocalService) -> None:
    before = service.metric("multiworld_requests_total", reason="cancelled")
    host, port = service.url.removeprefix("http://").split(":")
    head = f"POST /predict HTTP/1.1\r\nHost: {host}\r\nContent-Type: image/jpeg\r\nContent-Length: {len(PHOTO)}\r\n\r\n"
    with frozen(service.worker_pids().values()), socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + PHOTO)
        becomes(lambda: service.status()["requests_in_flight"], 1)
    service.wait_until_complete(WAIT_S)
    assert answers(service) == [200, 200, 200]
    becomes(lambda: service.metric("multiworld_requests_total", reason="cancelled"), before + 1)
    becomes(lambda: service.status()["requests_in_flight"], 0)


def test_killed_frontend_loses_only_its_connections_and_is_restarted(service: LocalService) -> None:
    with client_of(service, "frontend-0") as lost, client_of(service, "frontend-1") as kept:
        since = len(service.lines)
        os.kill(pids(service)["frontend-0"], signal.SIGKILL)
        with contextlib.suppress(
            httpx.TransportError
        ):  # unless the client notices the end of its connection before it sends
            ask(lost)
        assert ask(kept).status_code == 200
        wait_until_serving(service, "frontend-0", since)
        assert ask(lost).status_code == 200, "on a new connection"
    assert service.metric("multiworld_frontend_restarts_total", slot="0") >= 1
    becomes(lambda: service.metric("multiworld_frontends"), 2)


def test_requests_of_a_killed_frontend_are_withdrawn(service: LocalService) -> None:
    since = len(service.lines)
    with (
        client_of(service, "frontend-1") as lost,
        client_of(service, "frontend-0") as kept,
        ThreadPoolExecutor(1) as thread,
        frozen(service.worker_pids().values()),
    ):
        asked = thread.submit(ask, lost)
        deadline_s = time.monotonic() + WAIT_S
        while not kept.get("/status").json()["requests_in_flight"]:
            assert not asked.done()
            assert time.monotonic() < deadline_s
        os.kill(pids(service)["frontend-1"], signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            asked.result()
    wait_until_serving(service, "frontend-1", since)
    service.wait_until_complete(WAIT_S)
    becomes(lambda: service.status()["requests_in_flight"], 0)


def test_frozen_frontend_is_killed_while_the_other_serves(service: LocalService) -> None:
    with client_of(service, "frontend-1") as kept:
        since = len(service.lines)
        os.kill(pids(service)["frontend-0"], signal.SIGSTOP)
        while not any(line.message.startswith("frontend slot=0 ended") for line in service.lines[since:]):
            assert ask(kept).status_code == 200
    wait_until_serving(service, "frontend-0", since)


def test_frontend_completes_its_requests_when_it_stops(service: LocalService) -> None:
    since = len(service.lines)
    with run_load(service, clients=4) as load:
        os.kill(pids(service)["frontend-1"], signal.SIGTERM)
        service.wait_for(lambda line: "frontend slot=1 ended status=0" in line.message, WAIT_S, after=since)
        wait_until_serving(service, "frontend-1", since)
    unanswered = [sample for sample in load.samples if sample.status != 200]
    assert load.samples
    # A connection may be closed just when its client sends a request: once per client.
    assert {sample.status for sample in unanswered} <= {0}
    assert len(unanswered) <= 4


def test_loaded_and_unloaded_version_reach_all_frontends(service: LocalService) -> None:
    operators = service.metrics_url.removesuffix("/metrics")
    with client_of(service, "frontend-0") as one, client_of(service, "frontend-1") as other:
        assert main(["unload", "--operations-url", operators]) == 0
        for client in (one, other):
            refused = ask(client)
            assert (refused.status_code, refused.json()["reason"]) == (503, "not_ready")
        assert main(["load-version", "random:1", "--operations-url", operators]) == 0
        for client in (one, other):
            assert ask(client).headers["x-model-version"] == "random:1"


def test_all_processes_end_when_the_supervisor_is_killed() -> None:
    with small_service(frontends=2) as service:
        for name in ("frontend-0", "frontend-1"):
            wait_until_serving(service, name, 0)
        ends = select.poll()
        found = [
            *service.child_pids("frontend").values(),
            *service.child_pids("leader").values(),
            *service.child_pids("worker").values(),
        ]
        processes = [os.pidfd_open(pid) for pid in found]
        for process in processes:
            ends.register(process, select.POLLIN)
        os.kill(pids(service)["frontend-0"], signal.SIGSTOP)
        service.stop(signal.SIGKILL)
        for _ in processes:
            (ended, _), *_ = ends.poll(WAIT_S * 1e3)
            ends.unregister(ended)
            os.close(ended)
