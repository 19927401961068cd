"""`kill -9` of a worker, again and again, under the same load: LitServe, mosec and this service with the same model, side by side.

    python -m venv .venv-peers && .venv-peers/bin/pip install -e '.[peers]'
    .venv/bin/python -m benchmarks.kill_peers --python .venv-peers/bin/python

Each has two workers a stage, one compute thread a worker, batches of up to 8, and is asked by a closed loop of clients. A request that got
no answer within 30 s counts as hung, and not as failed too. Time until normal: from the kill to the end of the last three seconds in a row,
before the next kill, in which a request failed or fewer than half as many were answered as before the first kill.
"""

import argparse
import base64
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx

from chaos.images import photo
from chaos.load import Load, Question, Sample, load_on
from chaos.statistics import quantile
from deploy.service import LocalService

HUNG_S = 30.0
_START_S = 180.0
_STOP_S = 15.0
_SHARE = 0.5
_WINDOW_S = 3.0


@dataclass(frozen=True)
class AnyAnswer(Question):
    """A question to a server whose answers have a form of their own: status 200 will do."""

    def complaint(self, answer: httpx.Response, request_id: str) -> str:
        """See `Question.complaint`."""
        return "" if answer.status_code == 200 else answer.text[:200]


@dataclass(frozen=True)
class Running:
    """A server that answers.

    Attributes:
        pids: gives the processes of its workers that serve now.
    """

    url: str
    question: Question
    pids: Callable[[], list[int]]


@dataclass
class Outcome:
    """What the kills did to one server."""

    name: str
    load: Load = field(default_factory=Load)
    kills: list[float] = field(default_factory=list)
    started_s: float = 0.0
    ended_s: float = 0.0
    workers: int = 0
    """How many served at the end."""

    @property
    def hung(self) -> list[Sample]:
        return [sample for sample in self.load.failed if sample.took_s >= HUNG_S]

    @property
    def failed(self) -> list[Sample]:
        return [sample for sample in self.load.failed if sample.took_s < HUNG_S]

    @property
    def usual_hz(self) -> float:
        """Answers a second before the first kill."""
        return self._answered(self.started_s, self.kills[0]) / (self.kills[0] - self.started_s)

    def until_normal_s(self) -> list[float]:
        """For each kill; infinite when it never was normal again before the next."""
        ends = [*self.kills[1:], self.ended_s]
        return [self._until_normal_s(at_s, end_s, self.usual_hz) for at_s, end_s in zip(self.kills, ends, strict=True)]

    def _until_normal_s(self, at_s: float, end_s: float, usual_hz: float) -> float:
        starts = [at_s + n for n in range(int(end_s - at_s - _WINDOW_S) + 1)]
        bad = [since_s for since_s in starts if not self._normal(since_s, since_s + _WINDOW_S, usual_hz)]
        if not bad:
            return 0.0
        return math.inf if bad[-1] == starts[-1] else bad[-1] + _WINDOW_S - at_s

    def _normal(self, since_s: float, until_s: float, usual_hz: float) -> bool:
        enough = self._answered(since_s, until_s) >= _SHARE * usual_hz * (until_s - since_s)
        return enough and not any(since_s <= s.done_s < until_s for s in self.failed)

    def _answered(self, since_s: float, until_s: float) -> int:
        return sum(not s.failed and since_s <= s.done_s < until_s for s in self.load.samples)


@contextmanager
def peer(python: str, module: str, as_json: bool, *arguments: str) -> Iterator[Running]:
    """One of `benchmarks.peers`, with two workers."""
    jpeg = photo()
    body = json.dumps({"image": base64.b64encode(jpeg).decode()}).encode() if as_json else jpeg
    question = AnyAnswer(body, "application/json" if as_json else "image/jpeg")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", f"benchmarks.peers.{module}", "--port", str(port), "--pids", folder, *arguments]
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        running = Running(f"http://127.0.0.1:{port}", question, lambda: alive(Path(folder)))
        try:
            wait_until_it_answers(running, process, log)
            yield running
        finally:
            stop(process)


@contextmanager
def ours(stages: int, replicas: int) -> Iterator[Running]:
    with LocalService(
        model="resnet18", weights="random:0", stages=stages, replicas=replicas, worker_threads=1
    ) as service:
        yield Running(
            service.url, AnyAnswer(photo()), lambda: [pid for pid in service.worker_pids().values() if lives(pid)]
        )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def alive(folder: Path) -> list[int]:
    """The workers that have said that they are ready and still live, the one that did so first first."""
    marks = sorted((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: path.stat().st_mtime_ns)
    return [int(mark.name) for mark in marks if lives(int(mark.name))]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_it_answers(running: Running, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            headers = {"content-type": running.question.content_type}
            answer = httpx.post(f"{running.url}/predict", content=running.question.body, headers=headers, timeout=10.0)
            if answer.status_code == 200 and len(running.pids()) == 2:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"it does not answer; its log ends:\n{log.read_text()[-3000:]}")


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask it to end, then end all of its session."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(name: str, server: AbstractContextManager[Running], *, kills: int, clients: int, every_s: float) -> Outcome:
    """Kill one worker every so often while clients ask."""
    outcome = Outcome(name)
    with server as running, load_on(running.url, [running.question], clients=clients, timeout_s=HUNG_S) as outcome.load:
        time.sleep(3.0)  # connections open, caches warm
        outcome.started_s = time.time()
        time.sleep(every_s / 2)
        for number in range(kills):
            pids = running.pids()
            if pids:
                os.kill(pids[number % len(pids)], signal.SIGKILL)
            outcome.kills.append(time.time())
            time.sleep(every_s)
        outcome.ended_s, outcome.workers = time.time(), len(running.pids())
    return outcome


def report(outcomes: Sequence[Outcome]) -> None:
    print(
        f"\n{'':28} {'kills':>5} {'answers/s':>9} {'requests':>8} {'failed':>6} {'hung':>5} {'workers':>7} {'until normal s':>15} "
        f"{'median ms':>9} {'p99 ms':>8} {'max ms':>8}"
    )
    for each in outcomes:
        times = each.until_normal_s()
        normal = f"{quantile(times, 0.5):.0f} (max {max(times):.0f})"
        latency = "  ".join(f"{each.load.quantile_s(share) * 1e3:7.0f}" for share in (0.5, 0.99, 1.0))
        print(
            f"{each.name:28} {len(each.kills):>5} {each.usual_hz:>9.1f} {len(each.load.samples):>8} {len(each.failed):>6} "
            f"{len(each.hung):>5} {each.workers:>7} {normal:>15}   {latency}"
        )
    for each in outcomes:
        kinds = dict.fromkeys(f"{sample.status} {sample.error[:120]!r}" for sample in each.load.failed)
        for kind in list(kinds)[:3]:
            print(f"{each.name}: {kind}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment that has the peers")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--every-s", type=float, default=20.0)
    parser.add_argument("--json", type=Path, help="write every request and every kill")
    options = parser.parse_args()
    servers: dict[str, Callable[[], AbstractContextManager[Running]]] = {
        "LitServe, 2 workers": lambda: peer(options.python, "litserve_server", True),
        "mosec, 2 workers": lambda: peer(
            options.python, "mosec_server", False, "--address", "127.0.0.1", "--timeout", f"{HUNG_S * 1e3:.0f}"
        ),
        "this, 1 stage x 2 replicas": lambda: ours(1, 2),
        "this, 2 stages x 2 replicas": lambda: ours(2, 2),
    }
    outcomes = []
    for name, server in servers.items():
        print(f"== {name}", flush=True)
        outcomes.append(measure(name, server(), kills=options.kills, clients=options.clients, every_s=options.every_s))
    report(outcomes)
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
