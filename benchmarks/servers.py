"""Starts the servers that are compared: other projects' servers ("peers", with the interpreter that has them installed) and this service.

Each server runs during the block of its context manager.
"""

import base64
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from multiworld_serving.testing.load.requests import ReferenceRequest
from multiworld_serving.testing.local_service import LocalService

_ROOT = Path(__file__).parents[1]
_START_S = 180.0
_STOP_S = 15.0


@dataclass(frozen=True)
class AnyAnswer(ReferenceRequest):
    """A request whose answer is correct if its status is 200, because the answer formats of the servers differ."""

    def find_error(self, answer: httpx.Response, request_id: str) -> str:
        """See `ReferenceRequest.find_error`."""
        return "" if answer.status_code == 200 else answer.text[:200]


@dataclass(frozen=True)
class Running:
    """A running server.

    Attributes:
        questions: the requests to send to /predict in turn.
        pids: returns the process ids of its live workers.
        root: process id of the process that was started.
        peer: whether it is a server of another project; these can be suspended with SIGSTOP.
    """

    url: str
    questions: Sequence[ReferenceRequest]
    pids: Callable[[], list[int]]
    root: int
    peer: bool = False

    def cpu_s(self) -> float:
        """CPU time in seconds that its live processes have used."""
        return sum(cpu_s(pid) for pid in family(self.root))

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal to all its processes."""
        for pid in family(self.root):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)


@contextmanager
def peer(
    python: str, module: str, bodies: Sequence[bytes], *arguments: str, as_json: bool = False, workers: int
) -> Iterator[Running]:
    """Run a server from `benchmarks.peers` during the block, which starts when `workers` workers are ready.

    Args:
        python: interpreter of the environment that has the server installed.
        as_json: whether the server expects a body as base64 in JSON.
    """
    questions = [AnyAnswer(each) for each in bodies]
    if as_json:
        encoded = ({"body": base64.b64encode(each).decode()} for each in bodies)
        questions = [AnyAnswer(json.dumps(each).encode(), "application/json") for each in encoded]
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", f"benchmarks.peers.{module}", "--port", str(port), "--pids", folder, *arguments]
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        running = Running(f"http://127.0.0.1:{port}", questions, lambda: alive(Path(folder)), process.pid, peer=True)
        try:
            wait_until_it_answers(running, process, log, workers)
            yield running
        finally:
            running.signal(signal.SIGCONT)  # a stopped process does not handle SIGTERM
            stop(process)


@contextmanager
def ours(bodies: Sequence[bytes], **settings: Any) -> Iterator[Running]:
    """Run this service during the block, with these settings of `multiworld serve`."""
    os.environ["PYTHONPATH"] = str(_ROOT)  # its workers import stages in Python from here
    with LocalService(**settings) as service:
        pids = service.worker_pids
        questions = [AnyAnswer(each) for each in bodies]
        yield Running(service.url, questions, lambda: [p for p in pids().values() if lives(p)], service.pid)


def bodies_of(model: str, jpeg: bytes) -> list[bytes]:
    """What is asked of a model: the photo, or texts of 3 to 200 tokens."""
    if model != "text":
        return [jpeg]
    words = [each for each in (_ROOT / "examples/text_classifier/vocabulary.txt").read_text().split() if each.isalpha()]
    random_ = random.Random(0)
    return [" ".join(random_.choices(words, k=random_.randint(1, 198))).encode() for _ in range(100)]


def stop_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that the servers are stopped, too."""

    def stop(_signum: int, _frame: object) -> None:
        raise SystemExit("stopped")

    signal.signal(signal.SIGTERM, stop)


def family(root: int) -> list[int]:
    """Process ids of `root` and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_s(pid: int) -> float:
    """CPU time in seconds of a process and its terminated children; 0 if the process does not exist."""
    with suppress(OSError):
        return sum(map(int, _stat(pid)[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the process name; the first is the state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def alive(folder: Path) -> list[int]:
    """Process ids of the live workers that have reported ready, in the order of their reports."""
    marks = sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: path.stat().st_mtime_ns)
    return [int(mark.name) for mark in marks if lives(int(mark.name))]


def lives(pid: int) -> bool:
    try:
        return _stat(pid)[0] != "Z"
    except OSError:
        return False


def wait_until_it_answers(running: Running, process: "subprocess.Popen[bytes]", log: Path, workers: int) -> None:
    deadline_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            first = running.questions[0]
            headers = {"content-type": first.content_type}
            answer = httpx.post(f"{running.url}/predict", content=first.body, headers=headers, timeout=10.0)
            if answer.status_code == 200 and len(running.pids()) == workers:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"it does not answer; its log ends:\n{log.read_text()[-3000:]}")


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Terminate the process; after it ends or a timeout, kill its process group."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
