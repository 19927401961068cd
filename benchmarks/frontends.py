"""CPU time per request in the supervisor, the leaders, the frontends and the workers, by number of `--frontends`.

    python -m benchmarks.frontends
    python -m benchmarks.frontends --frontends 1 4 --clients 64

Requests are small JPEG images and the model is small, so that request handling costs more than the model. The services run at the same
time and are measured in turn. The event loop of a leader uses one core, so 1 s divided by the CPU time of the leader per request is an
upper bound on the requests per second of one leader.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from benchmarks.breakdown import ask
from benchmarks.ranks import table
from benchmarks.servers import Running, cpu_s, family, ours, stop_on_sigterm
from benchmarks.throughput import machine
from multiworld_serving.testing.load.images import photo

KINDS = ("supervisor", "leader", "frontend", "worker", "total")


def used_s(running: Running) -> dict[str, float]:
    """CPU time used so far in seconds, by kind of process."""
    found = dict.fromkeys(KINDS, 0.0)
    for pid in family(running.root):
        command = b""
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        kind = next((kind for kind in KINDS if f"multiworld {kind}".encode() in command), "supervisor")
        used = cpu_s(pid)
        found[kind] += used
        found["total"] += used
    return found


def turn(running: Running, options: argparse.Namespace) -> dict[str, float]:
    """Requests per second, median latency in ms, and CPU time per request in ms."""
    before = used_s(running)
    outcome = ask(running, options.clients, options.seconds)
    after, answered = used_s(running), outcome.statuses[200]
    assert not outcome.failed, outcome.statuses
    found = {"a second": answered / options.seconds, "p50 ms": 1e3 * statistics.median(outcome.times_s[200])}
    return found | {kind: 1e3 * (after[kind] - before[kind]) / answered for kind in KINDS}


def row(frontends: int, turns: list[Mapping[str, float]]) -> list[str]:
    medians = {name: statistics.median(each[name] for each in turns) for name in turns[0]}
    return [str(frontends), *(f"{value:.2f}" for value in medians.values()), f"{1e3 / medians['leader']:.0f}"]


def main() -> int:
    stop_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frontends", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--leaders", type=int, default=1)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    options = parser.parse_args()
    small = {"model": "resnet18", "weights": "random:0", "image_size": 32, "stages": 1, "replicas": 1}
    with ExitStack() as stack:
        services = [
            (count, stack.enter_context(ours(photo(), frontends=count, leaders=options.leaders, **small)))
            for count in options.frontends
        ]
        turns: list[list[Mapping[str, float]]] = [[] for _ in services]
        for number in range(options.rounds + 1):
            for (_, running), taken in zip(services, turns, strict=True):
                found = turn(running, options)
                if number:  # the first turn is a warm-up
                    taken.append(found)
    rows = [row(count, taken) for (count, _), taken in zip(services, turns, strict=True)]
    columns = ["frontends", "a second", "p50 ms", *(f"{kind}, CPU ms" for kind in KINDS), "most a leader can"]
    table(f"ResNet-18 on 32 x 32 pixels, {options.clients} clients: {machine()}", columns, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
