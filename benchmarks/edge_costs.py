"""What tensors cost on their way: CPU time of leaders and frontends per image, and what a stage boundary costs in throughput.

    python -m benchmarks.edge_costs
    cd OTHER_CHECKOUT && PYTHONPATH=. python PATH/benchmarks/edge_costs.py

The second form measures another checkout, also an older one in which the leader speaks HTTP. Run both in turn on a quiet machine. Each part
starts services of its own; `stages` asks its two services in turn.

    leader    2 stages, 2 frontends, 16 clients, ResNet-50 in bfloat16, 224 pixels
    stages    images/s of 2 stages with 1 replica over 1 stage with 2 replicas, ResNet-50 in bfloat16, 16 clients
    small     ResNet-18 on 32 pixels, 64 connections
    frontend  JPEG of 65 KB, 500 x 375, ResNet-18 on 224 pixels, 16 clients
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import uvloop

# Also the modules of an older checkout have these names.
from benchmarks.connections import Connections, Outcome, request_bytes
from benchmarks.servers import Running, cpu_s, family, ours, stop_on_sigterm
from benchmarks.throughput import machine

try:
    from multiworld_serving.testing.load.images import photo
except ImportError:
    from chaos.images import photo  # type: ignore[import-not-found, no-redef]

KINDS = ("leader", "frontend", "worker")
WARM_UP_S = 3.0


def used_s(running: Running) -> dict[str, float]:
    """CPU time used so far in seconds, by kind of process."""
    commands = {}
    for pid in family(running.root):
        with suppress(OSError):
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes()
    named = any(b"multiworld leader" in command for command in commands.values())
    found = dict.fromkeys(KINDS, 0.0)
    for pid, command in commands.items():
        if named:
            kind = next((kind for kind in KINDS if f"multiworld {kind}".encode() in command), None)
        else:  # an older checkout: the process that was started is the leader
            kind = "leader" if pid == running.root else "frontend" if b"frontend" in command else "worker"
        if kind is not None:
            found[kind] += cpu_s(pid)
    return found


def load(running: Running, clients: int, seconds: float) -> Outcome:
    request = request_bytes("/predict", running.question.content_type, running.question.body)

    async def loop() -> Outcome:
        connections = Connections(running.url)
        try:
            return await connections.closed_loop(request, clients, seconds)
        finally:
            connections.close()

    return uvloop.run(loop())


def turn(running: Running, clients: int, seconds: float) -> dict[str, float]:
    """Images per second, and CPU time in ms per image by kind of process."""
    before = used_s(running)
    outcome = load(running, clients, seconds)
    after, answered = used_s(running), outcome.statuses[200]
    assert answered, outcome.statuses
    assert not outcome.failed, outcome.statuses
    costs = {kind: 1e3 * (after[kind] - before[kind]) / answered for kind in KINDS}
    return {"images/s": answered / outcome.seconds} | costs | {"total": sum(costs.values())}


@contextmanager
def served(jpeg: bytes, clients: int, **settings: Any) -> Iterator[Callable[[float], dict[str, float]]]:
    """Run a service during the block. Yields a function that loads it for so many seconds and returns the figures of `turn`."""
    with ours(jpeg, weights="random:0", **settings) as running:
        load(running, clients, WARM_UP_S)
        yield lambda seconds: turn(running, clients, seconds)


def medians(turns: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in turns) for name in turns[0]}


def show(name: str, figures: dict[str, float]) -> None:
    print(f"{name:28}" + "".join(f"{key} {value:9.3f}   " for key, value in figures.items()), flush=True)


def measure_leader(options: argparse.Namespace) -> None:
    settings = {"model": "resnet50", "precision": "bfloat16", "stages": 2, "replicas": 1, "frontends": 2}
    with served(photo(), 16, **settings, **options.settings) as run:
        show("leader", medians([run(options.seconds) for _ in range(options.rounds)]))


def measure_stages(options: argparse.Namespace) -> None:
    settings = {"model": "resnet50", "precision": "bfloat16", **options.settings}
    with ExitStack() as stack:
        one = stack.enter_context(served(photo(), 16, **settings, stages=1, replicas=2))
        two = stack.enter_context(served(photo(), 16, **settings, stages=2, replicas=1))
        turns = [(one(options.seconds), two(options.seconds)) for _ in range(options.rounds)]
    show("1 stage, 2 replicas", medians([each for each, _ in turns]))
    show("2 stages, 1 replica", medians([each for _, each in turns]))
    ratio = statistics.median(two["images/s"] / one["images/s"] for one, two in turns)
    show("2 stages over 1 stage", {"images/s": ratio})


def measure_small(options: argparse.Namespace) -> None:
    settings = {"model": "resnet18", "image_size": 32, "stages": 1, "replicas": 1, "frontends": 1}
    with served(photo(width=32, height=32), 64, **settings, **options.settings) as run:
        show("small", medians([run(options.seconds) for _ in range(options.rounds)]))


def measure_frontend(options: argparse.Namespace) -> None:
    settings = {"model": "resnet18", "stages": 1, "replicas": 1, "frontends": 1}
    with served(photo(width=500, height=375), 16, **settings, **options.settings) as run:
        show("frontend", medians([run(options.seconds) for _ in range(options.rounds)]))


PARTS = {"leader": measure_leader, "stages": measure_stages, "small": measure_small, "frontend": measure_frontend}


def main() -> int:
    stop_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="further settings, such as edge_dtype=bfloat16"
    )
    options = parser.parse_args()
    options.settings = dict(each.split("=", 1) for each in options.set)
    print(f"{Path.cwd().name}: {machine()}; CPU time in ms per image", flush=True)
    for part in options.parts:
        PARTS[part](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
