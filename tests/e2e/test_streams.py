"""Streams of a pipeline in Python with real processes: what clients get when the worker of their stream is killed."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from multiworld_serving.testing.local_service import LocalService
from tests.waiting import wait_until

PIPELINE = """
import os
import time
from pathlib import Path

from multiworld_serving import Stage

FOLDER = Path(__file__).parent


class Read(Stage):
    replicas = 1

    def __call__(self, requests):
        return [each.json() for each in requests]


class Tell(Stage):
    def stream(self, row):
        return self.chunks(row, 0)

    def chunks(self, row, first):
        notes = FOLDER / row["name"]
        try:
            for number in range(first, row["count"]):
                (notes / f"at-{number}-{os.getpid()}").touch()
                while number in row["held"] and not (notes / f"go-{number}").exists():
                    time.sleep(0.01)
                yield f"<{number}>"
        finally:
            (notes / "ended").touch()


class TellOn(Tell):
    def resume(self, row, sent):
        return self.chunks(row, len(sent))


tell = [Read, Tell]
resuming = [Read, TellOn]
"""
COUNT = 12
CHUNKS = [f"<{number}>" for number in range(COUNT)]
EVENTS = {"accept": "text/event-stream"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    (folder / "streams.py").write_text(PIPELINE)
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[LocalService]:
    models = ",".join(f"{name}={folder}/streams.py:{name}" for name in ("tell", "resuming"))
    waits: dict[str, Any] = {
        "heartbeat_timeout_s": 10,
        "timeout_s": 200,
        "recovery_grace_s": 120,
        "hang_timeout_s": 200,
    }
    with LocalService(model=models, leaders=2, replicas=2, threads=1, **waits) as running:
        yield running


class Streaming:
    """A request in a thread of its own. Its generator waits before the chunks in `held` until they are let go.

    Attributes:
        chunks: the data of its events, or the parts of its body.
        error: of the last event; or the exception of the client.
    """

    def __init__(
        self, service: LocalService, folder: Path, model: str, *held: int, events: bool = True, count: int = COUNT
    ) -> None:
        self.notes = folder / f"{model}-{len(list(folder.iterdir()))}"
        self.notes.mkdir()
        self.chunks: list[str] = []
        self.error: Any = None
        self.leave = threading.Event()
        self._url, self._headers = f"{service.url}/predict/{model}", EVENTS if events else {}
        self._row = {"name": self.notes.name, "count": count, "held": held}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with (
            httpx.Client(timeout=200) as client,
            client.stream("POST", self._url, json=self._row, headers=self._headers) as response,
        ):
            try:
                if not self._headers:
                    self.chunks.extend(response.iter_text())
                for line in response.iter_lines() if self._headers else ():
                    if line == "event: error":
                        self.error = True
                    elif line and self.error:
                        self.error = json.loads(line.removeprefix("data: "))
                    elif line:
                        self.chunks.append(line.removeprefix("data: "))
                    if self.leave.is_set():
                        return
            except httpx.RemoteProtocolError as error:
                self.error = error

    def pids_at(self, number: int) -> list[int]:
        """The processes that have begun to compute this chunk."""
        return [int(path.name.rpartition("-")[2]) for path in self.notes.glob(f"at-{number}-*")]

    def kill_at(self, number: int) -> None:
        """Kill the worker that computes this chunk, and let the next one compute it."""
        wait_until(lambda: self.pids_at(number))
        (pid,) = self.pids_at(number)
        os.kill(pid, signal.SIGKILL)
        (self.notes / f"go-{number}").touch()

    def end(self) -> list[str]:
        """The chunks, when the response has ended."""
        self._thread.join(300)
        assert not self._thread.is_alive()
        return self.chunks


def test_a_worker_killed_before_the_first_chunk_costs_nothing(service: LocalService, folder: Path) -> None:
    for events in (True, False):
        stream = Streaming(service, folder, "tell", 0, events=events)
        stream.kill_at(0)
        assert ("".join(stream.end()), stream.error) == ("".join(CHUNKS), None)
        assert len(stream.pids_at(0)) == 2
        assert len(stream.pids_at(COUNT - 1)) == 1
        service.wait_until_complete(200)


def test_a_worker_killed_after_a_chunk_ends_events_with_an_error_and_a_body_abnormally(
    service: LocalService, folder: Path
) -> None:
    stream = Streaming(service, folder, "tell", 3)
    stream.kill_at(3)
    assert stream.end() == CHUNKS[:3]
    assert (stream.error["reason"], len(stream.error["request_id"])) == ("session_lost", 32)
    service.wait_until_complete(200)
    body = Streaming(service, folder, "tell", 3, events=False)
    body.kill_at(3)
    assert "".join(body.end()) == "".join(CHUNKS[:3])
    assert isinstance(body.error, httpx.RemoteProtocolError)
    service.wait_until_complete(200)


def test_a_stage_that_resumes_sends_every_chunk_exactly_once(service: LocalService, folder: Path) -> None:
    stream = Streaming(service, folder, "resuming", 0, 4, 5)
    for number in (0, 4):
        stream.kill_at(number)
        service.wait_until_complete(200)
    stream.kill_at(5)
    assert (stream.end(), stream.error) == (CHUNKS, None)
    assert [len(stream.pids_at(number)) for number in range(7)] == [2, 1, 1, 1, 2, 2, 1]
    service.wait_until_complete(200)


def test_a_stage_that_resumes_survives_the_loss_of_its_leader(service: LocalService, folder: Path) -> None:
    stream = Streaming(service, folder, "resuming", 4)
    wait_until(lambda: stream.pids_at(4))
    status = httpx.get(f"{service.url}/status", params={"model": "resuming"}).json()
    (pid,) = (each["pid"] for each in status["leaders"] if each["name"] == status["leader"])
    os.kill(pid, signal.SIGKILL)
    (stream.notes / "go-4").touch()
    assert (stream.end(), stream.error) == (CHUNKS, None)
    service.wait_until_complete(200)


def test_the_loss_of_an_earlier_stage_does_not_concern_a_stream(service: LocalService, folder: Path) -> None:
    stream = Streaming(service, folder, "tell", 3)
    wait_until(lambda: stream.pids_at(3))
    stages = httpx.get(f"{service.url}/status", params={"model": "tell"}).json()["stages"]
    os.kill(stages[0]["replicas"][0]["pid"], signal.SIGKILL)
    (stream.notes / "go-3").touch()
    assert (stream.end(), stream.error) == (CHUNKS, None)
    service.wait_until_complete(200)


def test_a_client_that_disconnects_ends_the_generator(service: LocalService, folder: Path) -> None:
    stream = Streaming(service, folder, "tell", count=1_000_000)
    wait_until(lambda: stream.pids_at(5))
    stream.leave.set()
    stream.end()
    wait_until((stream.notes / "ended").exists)
