"""Repeated `kill -9` of a worker under load: LitServe, mosec, Ray Serve and this service with the same model.

    python -m venv .venv-peers && .venv-peers/bin/pip install -e '.[peers]'
    .venv/bin/python -m benchmarks.kill_peers --python .venv-peers/bin/python --json kills.json
    .venv/bin/python docs/plot.py kills.json docs/img/kills.svg

Each server has two workers per stage, one compute thread per worker and batches of up to 8. The load is a closed loop of clients. A request
without an answer within 30 s counts as hung, not as failed. Time until normal: seconds from the kill to the end of the last window of 3 s,
before the next kill, in which a request failed or the answers per second were below half of the rate before the first kill.
"""

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import servers
from benchmarks.servers import Running, bodies_of
from multiworld_serving.testing.load.clients import Load, Sample, run_load
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.load.measurement import quantile

HUNG_S = 30.0
_SHARE = 0.5
_WINDOW_S = 3.0


@dataclass
class Outcome:
    """Results of the kills for one server."""

    name: str
    load: Load = field(default_factory=Load)
    kills: list[float] = field(default_factory=list)
    started_s: float = 0.0
    ended_s: float = 0.0
    workers: int = 0
    """Number of live workers at the end."""

    @property
    def hung(self) -> list[Sample]:
        return [sample for sample in self.load.failed if sample.took_s >= HUNG_S]

    @property
    def failed(self) -> list[Sample]:
        return [sample for sample in self.load.failed if sample.took_s < HUNG_S]

    @property
    def usual_hz(self) -> float:
        """Answers per second before the first kill."""
        return self._answered(self.started_s, self.kills[0]) / (self.kills[0] - self.started_s)

    def until_normal_s(self) -> list[float]:
        """Time until normal in seconds for each kill; infinite if the server was not normal again before the next kill."""
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


def ours(model: str, stages: int, **settings: str) -> AbstractContextManager[Running]:
    """A bundle, or a pipeline in Python with so many stages."""
    chosen = settings | {"stages": stages} if settings else {"model": f"benchmarks.peers.stages:{model}_{stages}"}
    return servers.ours(bodies_of(model, photo()), **{"model": model, "replicas": 2, "threads": 1} | chosen)


def peer(
    options: argparse.Namespace, module: str, *more: str, as_json: bool = False
) -> AbstractContextManager[Running]:
    bodies, arguments = bodies_of(options.model, photo()), ("--model", options.model, *more)
    return servers.peer(options.python, module, bodies, *arguments, as_json=as_json, workers=2)


def measure(name: str, server: AbstractContextManager[Running], *, kills: int, clients: int, every_s: float) -> Outcome:
    """Kill one worker every `every_s` seconds, `kills` times, under the load of `clients` clients."""
    outcome = Outcome(name)
    with (
        server as running,
        run_load(running.url, running.questions, clients=clients, timeout_s=HUNG_S) as outcome.load,
    ):
        time.sleep(3.0)  # warm-up: open connections, fill caches
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
        took_s = [sample.took_s for sample in each.load.samples]
        latency = "  ".join(f"{quantile(took_s, share) * 1e3:7.0f}" for share in (0.5, 0.99, 1.0))
        print(
            f"{each.name:28} {len(each.kills):>5} {each.usual_hz:>9.1f} {len(each.load.samples):>8} {len(each.failed):>6} "
            f"{len(each.hung):>5} {each.workers:>7} {normal:>15}   {latency}"
        )
    for each in outcomes:
        kinds = dict.fromkeys(f"{sample.status} {sample.error[:120]!r}" for sample in each.load.failed)
        for kind in list(kinds)[:3]:
            print(f"{each.name}: {kind}")


def write(outcomes: Sequence[Outcome], file: Path) -> None:
    """Write the times of the kills and of all requests, in seconds: [sent, took, whether it failed or hung]."""
    found = {
        each.name: {
            "kills": each.kills,
            "samples": [(sample.done_s - sample.took_s, sample.took_s, sample.failed) for sample in each.load.samples],
        }
        for each in outcomes
    }
    file.write_text(json.dumps(found), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment that has the peers")
    parser.add_argument("--model", default="resnet18", help="or text, which only peers and stages in Python serve")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--every-s", type=float, default=20.0)
    parser.add_argument("--json", type=Path, help="write each request to this file")
    parser.add_argument("--only", nargs="+", help="servers whose names begin so")
    options = parser.parse_args()
    compared: dict[str, Callable[[], AbstractContextManager[Running]]] = {
        "LitServe, 2 workers": lambda: peer(options, "litserve_server", as_json=True),
        "mosec, 2 workers": lambda: peer(
            options, "mosec_server", "--address", "127.0.0.1", "--timeout", f"{HUNG_S * 1e3:.0f}"
        ),
        "Ray Serve, 2 replicas": lambda: peer(options, "ray_server"),
        "this, 1 stage x 2 replicas": lambda: ours(options.model, 1, weights="random:0"),
        "this, 2 stages x 2 replicas": lambda: ours(options.model, 2, weights="random:0"),
        "this, in Python, 2 stages x 2 replicas": lambda: ours(options.model, 2),
    }
    outcomes = []
    for name, server in compared.items():
        if options.only and not name.startswith(tuple(options.only)):
            continue
        print(f"== {name}", flush=True)
        outcomes.append(measure(name, server(), kills=options.kills, clients=options.clients, every_s=options.every_s))
    report(outcomes)
    if options.json:
        write(outcomes, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
