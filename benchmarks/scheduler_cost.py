"""Cost of scheduling: microseconds per event, by number of workers.

Claim: at most 50 µs per event with 100 workers, and at most logarithmic growth up to 10,000 workers.

    python -m benchmarks.scheduler_cost --plot cost.svg
    python -m benchmarks.scheduler_cost --workers 10 100 1000 --events 20000

All workers are busy: full batches pass through two stages while requests arrive, and some links break and recover. Only the scheduler is
timed (`handle` and `next_wakeup_s`), in CPU time, so that other load on the machine matters little. `gc.freeze` excludes the time that the
garbage collector needs for long-lived objects. Each figure is the median of the repeats, which are slices of one run.

Growth is measured by a fit of a + b·log10(workers) to the costs of up to 1,000 workers, and by the ratio of the cost with more workers to
this fit. The ratio includes the effect of data that no longer fits into the CPU cache.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path
from random import Random
from time import process_time

from multiworld_serving.server.scheduling.scheduler import (
    Action,
    Answer,
    BatchDone,
    Event,
    ReplicaLost,
    ReplicaReady,
    RequestArrived,
    Scheduler,
    SchedulerConfig,
    SendBatch,
    Tick,
)

_STAGES = 2


class Load:
    """A closed loop in virtual time that keeps all workers busy."""

    def __init__(self, workers: int, max_batch_size: int, keys: int) -> None:
        self.random = Random(1)
        self.keys = [str(number) for number in range(keys)]
        self.scheduler = Scheduler(
            SchedulerConfig(num_stages=_STAGES, max_batch_size=max_batch_size, queue_limit=4 * workers * max_batch_size)
        )
        self.now_s = 0.0
        self.spent_s = 0.0
        self.worst_s = 0.0
        self.events = 0
        self.requests = 0
        self.open = 0
        self.in_flight: deque[SendBatch] = deque()
        self.target = 3 * workers * max_batch_size
        for number in range(workers):
            self.handle(ReplicaReady(f"{number}#0", number % _STAGES, "v1"))

    def handle(self, event: Event) -> None:
        started_s = process_time()
        actions = self.scheduler.handle(event, self.now_s)
        self.scheduler.next_wakeup_s()
        spent_s = process_time() - started_s
        self.spent_s += spent_s
        self.worst_s = max(self.worst_s, spent_s)
        self.events += 1
        self.follow(actions)

    def follow(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, SendBatch):
                self.in_flight.append(action)
            elif isinstance(action, Answer):
                self.open -= len(action.rows)

    def run(self, events: int) -> None:
        last = self.events + events
        while self.events < last:
            while self.open < self.target and self.events < last:
                self.open += 1
                self.requests += 1
                deadline_s = self.now_s + self.random.uniform(50, 100)
                self.handle(RequestArrived(self.requests, deadline_s, self.random.choice(self.keys)))
            self.answer_one()

    def answer_one(self) -> None:
        self.now_s += 1e-4
        if not self.in_flight:
            self.handle(Tick())
            return
        self.in_flight.rotate(self.random.randrange(-3, 4))
        send = self.in_flight.popleft()
        if self.random.random() < 0.001:
            name, generation = send.replica.split("#")
            self.handle(ReplicaLost(send.replica, "exit"))
            self.handle(ReplicaReady(f"{name}#{int(generation) + 1}", send.stage, "v1"))
        else:
            self.handle(BatchDone(send.batch, send.replica))


@dataclass(frozen=True)
class Cost:
    workers: int
    slices_us: tuple[float, ...]
    """Microseconds per event in each slice of the run."""
    worst_us: float

    @property
    def median_us(self) -> float:
        return statistics.median(self.slices_us)


def measure(workers: int, max_batch_size: int, events: int, repeats: int, keys: int) -> Cost:
    load = Load(workers, max_batch_size, keys)
    load.run(3 * load.target)  # warm-up: until all workers are busy
    gc.collect()
    gc.freeze()
    load.worst_s, slices_us = 0.0, []
    for _ in range(repeats):
        load.spent_s = 0.0
        load.run(events)
        slices_us.append(load.spent_s / events * 1e6)
    gc.unfreeze()
    return Cost(workers, tuple(slices_us), load.worst_s * 1e6)


def fit(costs: Sequence[Cost]) -> tuple[float, float]:
    """Least-squares fit of a + b·log10(workers): returns (a, b)."""
    line = statistics.linear_regression([log10(cost.workers) for cost in costs], [cost.median_us for cost in costs])
    return line.intercept, line.slope


def draw(costs: Sequence[Cost], line: tuple[float, float] | None, file: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - needed only with --plot

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    workers = [cost.workers for cost in costs]
    axes.errorbar(
        workers,
        [cost.median_us for cost in costs],
        yerr=[
            [cost.median_us - min(cost.slices_us) for cost in costs],
            [max(cost.slices_us) - cost.median_us for cost in costs],
        ],
        fmt="o",
        capsize=3,
        label="measured: median, least and most",
    )
    if line is not None:
        axes.plot(workers, [line[0] + line[1] * log10(each) for each in workers], "--", label="logarithmic")
    axes.set(xscale="log", xlabel="workers", ylabel="µs an event")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 30, 100, 300, 1000, 3000, 10_000])
    parser.add_argument("--events", type=int, default=20_000, help="timed events in each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-batch-size", type=int, default=8)
    parser.add_argument("--keys", type=int, default=1, help="different keys of the requests; a batch has one")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it too (matplotlib, from the extra `bench`)")
    arguments = parser.parse_args()
    costs: list[Cost] = []
    print(f"{'workers':>8} {'µs/event':>9} {'least':>6} {'most':>6} {'worst event µs':>15} {'events/s':>9}")
    for workers in sorted(arguments.workers):
        cost = measure(workers, arguments.max_batch_size, arguments.events, arguments.repeats, arguments.keys)
        costs.append(cost)
        print(
            f"{workers:>8} {cost.median_us:>9.1f} {min(cost.slices_us):>6.1f} {max(cost.slices_us):>6.1f} "
            f"{cost.worst_us:>15.0f} {1e6 / cost.median_us:>9.0f}",
            flush=True,
        )
    small = [cost for cost in costs if cost.workers <= 1000]
    line = fit(small) if len(small) > 1 else None
    if line is not None:
        largest = costs[-1]
        foreseen_us = line[0] + line[1] * log10(largest.workers)
        print(
            f"up to 1,000 workers: {line[0]:.1f} + {line[1]:.1f}·log10(workers) µs; at {largest.workers:,} that would be "
            f"{foreseen_us:.1f} µs, it is {largest.median_us:.1f} µs ({largest.median_us / foreseen_us - 1:+.0%})"
        )
    if arguments.plot is not None:
        draw(costs, line, arguments.plot)


if __name__ == "__main__":
    main()
