"""What scheduling costs: microseconds an event, by number of links.

Claim: at most 50 µs an event at 100 links, and growth no worse than logarithmic up to 10,000 links.

    python -m benchmarks.scheduler_cost --links 10 100 1000 10000

Every link is kept busy: full batches travel through two stages while requests keep arriving, and some links break and
come back. Only the scheduler is timed (`handle` and `next_wakeup_s`): in CPU time, so that a busy machine does not
matter, and without what the garbage collector takes to look through all that is alive (`gc.freeze`).
"""

from __future__ import annotations

import argparse
import gc
from collections import deque
from random import Random
from time import process_time

from server.scheduler import (
    Action,
    Answer,
    BatchDone,
    Event,
    LinkBroken,
    LinkReady,
    RequestArrived,
    Scheduler,
    SchedulerConfig,
    SendBatch,
    Tick,
)

_STAGES = 2


class Load:
    """A closed loop that keeps all links busy, in virtual time."""

    def __init__(self, links: int, max_batch_size: int) -> None:
        self.random = Random(1)
        self.scheduler = Scheduler(
            SchedulerConfig(num_stages=_STAGES, max_batch_size=max_batch_size, queue_limit=4 * links * max_batch_size)
        )
        self.now_s = 0.0
        self.spent_s = 0.0
        self.worst_s = 0.0
        self.events = 0
        self.requests = 0
        self.open = 0
        self.in_flight: deque[SendBatch] = deque()
        self.target = 3 * links * max_batch_size
        for number in range(links):
            self.handle(LinkReady(f"{number}#0", number % _STAGES, "v1"))

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
                self.handle(RequestArrived(self.requests, self.now_s + self.random.uniform(50, 100)))
            self.answer_one()

    def answer_one(self) -> None:
        self.now_s += 1e-4
        if not self.in_flight:
            self.handle(Tick())
            return
        self.in_flight.rotate(self.random.randrange(-3, 4))
        send = self.in_flight.popleft()
        if self.random.random() < 0.001:
            name, epoch = send.link.split("#")
            self.handle(LinkBroken(send.link, "exit"))
            self.handle(LinkReady(f"{name}#{int(epoch) + 1}", send.stage, "v1"))
        else:
            self.handle(BatchDone(send.batch, send.link))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--events", type=int, default=50_000, help="timed events for each number of links")
    parser.add_argument("--max-batch-size", type=int, default=8)
    arguments = parser.parse_args()
    print(f"{'links':>7} {'events':>8} {'µs/event':>9} {'worst µs':>9} {'events/s':>9}")
    for links in arguments.links:
        load = Load(links, arguments.max_batch_size)
        load.run(3 * load.target)  # until everything is busy
        gc.collect()
        gc.freeze()
        load.spent_s = load.worst_s = 0.0
        load.run(arguments.events)
        mean_s = load.spent_s / arguments.events
        print(
            f"{links:>7} {arguments.events:>8} {mean_s * 1e6:>9.1f} {load.worst_s * 1e6:>9.0f} {1 / mean_s:>9.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
