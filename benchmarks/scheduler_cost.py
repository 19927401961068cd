"""Cost of scheduling: microseconds per event, by number of workers.

Claim: at most 50 µs per event with 100 workers, and at most logarithmic growth up to 10,000 workers.

    python -m benchmarks.scheduler_cost
    python -m benchmarks.scheduler_cost --workers 10 100 1000 --events 20000

All workers are busy: full batches pass through two stages while requests arrive, and some links break and recover. Only the scheduler is
timed (`handle` and `next_wakeup_s`), in CPU time, so that other load on the machine matters little. `gc.freeze` excludes the time that the
garbage collector needs for long-lived objects. Each figure is the median of the repeats, which are slices of one run.

"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections import deque
from dataclasses import dataclass
from random import Random
from time import process_time

from multiworld_serving.server.leader.scheduling.actions import Action, Answer, SendBatch
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from multiworld_serving.server.leader.scheduling.events import (
    BatchDone,
    Event,
    ReplicaLost,
    ReplicaReady,
    RequestArrived,
    Tick,
)
from multiworld_serving.server.leader.scheduling.scheduler import Scheduler

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 30, 100, 300, 1000, 3000, 10_000])
    parser.add_argument("--events", type=int, default=20_000, help="timed events in each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-batch-size", type=int, default=8)
    parser.add_argument("--keys", type=int, default=1, help="different keys of the requests; a batch has one")
    arguments = parser.parse_args()
    print(f"{'workers':>8} {'µs/event':>9} {'least':>6} {'most':>6} {'worst event µs':>15} {'events/s':>9}")
    for workers in sorted(arguments.workers):
        cost = measure(workers, arguments.max_batch_size, arguments.events, arguments.repeats, arguments.keys)
        print(
            f"{workers:>8} {cost.median_us:>9.1f} {min(cost.slices_us):>6.1f} {max(cost.slices_us):>6.1f} "
            f"{cost.worst_us:>15.0f} {1e6 / cost.median_us:>9.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
