"""Overload with three times the capacity: goodput, how the service rejects the rest, and the cost.

    python -m benchmarks.overload
    python -m benchmarks.overload --factor 5 --seconds 60 --deadline 2

A closed loop first measures the capacity: the highest rate of answers within the deadline over several numbers of clients. An open loop
then sends requests at `factor` times this rate with the same deadline. Exits with 1 when the goodput is below 90 % of the capacity, a
request gets no answer, or the memory of the leader grows by more than the limit.

The clients run on the same cores as the service. To reduce their cost, they send prepared bytes over persistent connections.
"""

import argparse
import statistics
import sys

import uvloop

from benchmarks.connections import Connections, Outcome, request_bytes
from benchmarks.ranks import table
from multiworld_serving.testing.chaos.system.processes import resources
from multiworld_serving.testing.load.images import photo
from multiworld_serving.testing.local_service import LocalService

GROWTH_MIB = 64
"""Allowed growth of resident memory under overload, in MiB: the queue, partly received bodies, and free memory that malloc keeps."""


async def run(service: LocalService, options: argparse.Namespace) -> bool:
    """Run both phases. Returns whether all conditions hold."""
    connections = Connections(service.url)
    request = request_bytes("/predict", "image/jpeg", photo(), {"X-Request-Timeout-S": f"{options.deadline:g}"})
    best = Outcome(1.0)
    rows = []
    for clients in options.clients:
        outcome = await connections.closed_loop(request, clients, options.seconds / 3)
        rows.append([f"closed, {clients} clients", f"{outcome.goodput:.1f}", *_row(outcome)])
        best = max(best, outcome, key=lambda each: each.goodput)
    before_mib = resources(service.pid).resident_mib
    rate = options.factor * best.goodput
    over = await connections.open_loop(request, rate, options.seconds)
    after_mib = resources(service.pid).resident_mib
    rows.append([f"open, {rate:.0f}/s, deadline {options.deadline:g} s", f"{over.goodput:.1f}", *_row(over)])
    columns = ("load", "answers/s", "200", "429", "504", "other", "median ms of 200", "of 429", "Retry-After s")
    table(f"{options.model}, {options.stages} stages of {options.replicas}", columns, rows)
    share = over.goodput / best.goodput
    print(
        f"goodput at {options.factor:g} times the capacity: {100 * share:.0f} % of {best.goodput:.1f}/s; "
        f"leader {before_mib:.0f} -> {after_mib:.0f} MiB; unanswered {over.unanswered}; "
        f"lost {service.metric('multiworld_requests_lost_total'):.0f}"
    )
    return share >= 0.9 and not over.unanswered and after_mib - before_mib < GROWTH_MIB


def _row(outcome: Outcome) -> list[str]:
    other = sum(count for status, count in outcome.statuses.items() if status not in (200, 429, 504))
    retry = f"{statistics.median(outcome.retry_after_s):.1f}" if outcome.retry_after_s else "-"
    counts = [str(count) for count in (outcome.statuses[200], outcome.statuses[429], outcome.statuses[504], other)]
    return [*counts, _median_ms(outcome, 200), _median_ms(outcome, 429), retry]


def _median_ms(outcome: Outcome, status: int) -> str:
    times = outcome.times_s.get(status)
    return f"{1e3 * statistics.median(times):.0f}" if times else "-"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 32, 64], help="of the closed loops")
    parser.add_argument("--factor", type=float, default=3.0, help="of the capacity")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the overload")
    parser.add_argument("--deadline", type=float, default=2.0, help="of each request, in seconds")
    chosen = parser.parse_args()
    with LocalService(
        model=chosen.model, weights="random:0", stages=chosen.stages, replicas=chosen.replicas
    ) as running:
        sys.exit(0 if uvloop.run(run(running, chosen)) else 1)
