"""Time of a request by phase, and CPU time per image. Requests are JPEG images, answers have five classes.

    python -m benchmarks.breakdown
    python -m benchmarks.breakdown --stages 1 --clients 1 8

The times come from `timings_ms` in each answer. `HTTP` is the rest of the time that the client measured, including its own work. `rest` is
time in the service that belongs to no phase. The figures are means, because means add up to the total that the client measured and medians
do not. CPU time is that of the leader and of the workers.
"""

import argparse
import json
import statistics
import sys

import uvloop

from benchmarks.connections import Connections, Outcome, request_bytes
from benchmarks.ranks import table
from benchmarks.servers import Running, cpu_s, ours, stop_on_sigterm
from benchmarks.throughput import machine
from multiworld_serving.testing.load.images import photo

PHASES = ("decode", "queue", "transfer", "compute")


def ask(running: Running, clients: int, seconds: float) -> Outcome:
    async def loop() -> Outcome:
        connections = Connections(running.url)
        try:
            request = request_bytes("/predict", running.question.content_type, running.question.body)
            return await connections.closed_loop(request, clients, seconds, bodies=True)
        finally:
            connections.close()

    return uvloop.run(loop())


def times_ms(outcome: Outcome) -> dict[str, float]:
    """Mean times by phase, and the mean total time that the client measured (`seen`)."""
    assert not outcome.failed, outcome.statuses
    assert outcome.bodies is not None
    said = [json.loads(body)["timings_ms"] for body in outcome.bodies]
    found = {phase: statistics.fmean(timings[phase] for timings in said) for phase in PHASES}
    total = statistics.fmean(timings["total"] for timings in said)
    seen = 1e3 * statistics.fmean(outcome.times_s[200])
    return {"seen": seen, "HTTP": seen - total, **found, "rest": total - sum(found.values())}


def measure(running: Running, clients: int, options: argparse.Namespace) -> dict[str, float]:
    """Medians over the rounds: mean milliseconds per request by phase, then CPU milliseconds per image."""
    rounds: list[dict[str, float]] = []
    for _ in range(options.rounds):
        leader_s, all_s = cpu_s(running.root), running.cpu_s()
        outcome = ask(running, clients, options.seconds)
        images = outcome.statuses[200]
        leader_ms, all_ms = (
            1e3 * (after_s - before_s) / images
            for before_s, after_s in ((leader_s, cpu_s(running.root)), (all_s, running.cpu_s()))
        )
        rounds.append({**times_ms(outcome), "leader CPU": leader_ms, "workers CPU": all_ms - leader_ms})
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def main() -> int:
    stop_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--replicas", type=int, default=1, help="of each stage")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    options = parser.parse_args()
    rows: list[list[str]] = []
    columns: list[str] = []
    settings = {"model": options.model, "replicas": options.replicas, "precision": options.precision}
    for stages in options.stages:
        with ours(photo(), weights="random:0", stages=stages, **settings) as running:
            ask(running, 8, 2.0)
            for clients in options.clients:
                found = measure(running, clients, options)
                columns = ["stages", "clients", *found]
                rows.append([str(stages), str(clients), *(f"{value:.1f}" for value in found.values())])
    table(f"{options.model}, {options.precision}, milliseconds: {machine()}", columns, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
