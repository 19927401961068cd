"""Simulates days of load with each way to choose the number of workers: late requests and worker-hours.

    python -m benchmarks.autoscaling --days 2

Runs the real scheduler, the real estimate of the replicas wanted and the real scaling policy in virtual time; clients, workers and failures
are simulated. The load has a daily curve and spikes of three times the load within a minute; workers fail and are replaced.
"""

import argparse
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import ceil, cos, inf, pi
from random import Random

from multiworld_serving.deploy.scaling.policy import Grow, Limits, ScalingPolicy, Stop
from multiworld_serving.server.capacity_report import CapacityReport
from multiworld_serving.server.scheduling.scheduler import (
    Action,
    Answer,
    BatchDone,
    Event,
    Reject,
    ReleaseReplica,
    ReplicaDraining,
    ReplicaLost,
    ReplicaReady,
    RequestArrived,
    Scheduler,
    SchedulerConfig,
    SendBatch,
    Tick,
)

STAGES = ((0.4, 0.1), (0.8, 0.2))
"""Seconds for the first row of a batch, and for each further one, by stage."""
OBJECTIVE_S, TIMEOUT_S = 5.0, 30.0
LEAST_PER_STAGE, MOST = 2, 40
START_S = 30.0
"""From the decision until a worker serves: placement, start of the container, weights."""
DOWN_AFTER_S = 300.0
LOW_PER_S, HIGH_PER_S = 0.8, 8.0
SPIKES_PER_DAY, SPIKE_FACTOR, SPIKE_S, RAMP_S = 4, 3.0, 600.0, 60.0
MTBF_S = 12 * 3600.0
DAY_S = 86_400.0


class Load:
    """Arrivals of a Poisson process: low at night, high at noon, with spikes."""

    def __init__(self, days: float, random: Random) -> None:
        self._random = random
        self._spikes_s = [(day + random.random()) * DAY_S for day in range(ceil(days)) for _ in range(SPIKES_PER_DAY)]

    def per_s(self, now_s: float) -> float:
        """The rate at this time."""
        curve = LOW_PER_S + (HIGH_PER_S - LOW_PER_S) * (1 - cos(2 * pi * now_s / DAY_S)) / 2
        ages = [now_s - at_s for at_s in self._spikes_s if 0 <= now_s - at_s < SPIKE_S]
        return curve * max((1 + (SPIKE_FACTOR - 1) * min(1.0, age_s / RAMP_S) for age_s in ages), default=1.0)

    def arrivals(self, until_s: float) -> Iterator[float]:
        """Times of the requests."""
        now_s, most_per_s = 0.0, HIGH_PER_S * SPIKE_FACTOR
        while (now_s := now_s + self._random.expovariate(most_per_s)) < until_s:
            if self._random.random() * most_per_s < self.per_s(now_s):
                yield now_s


@dataclass
class Worker:
    """A simulated worker: computes one batch after the other."""

    stage: int
    started_s: float
    free_s: float = 0.0
    ready: bool = False
    stopping: bool = False


@dataclass
class Result:
    """What happened."""

    answered: int = 0
    late: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    worker_s: float = 0.0
    most_workers: int = 0

    @property
    def requests(self) -> int:
        return self.answered + self.refused.total()


class Cluster:
    """A leader and its workers in virtual time."""

    def __init__(self, random: Random) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_stages=len(STAGES),
                target_latency_s=OBJECTIVE_S,
                hang_timeout_s=60.0,
                hedge_factor=None,
                queue_limit=256,
            )
        )
        self.now_s = 0.0
        self.workers: dict[str, Worker] = {}
        self.result = Result()
        self.computed_s = [0.0] * len(STAGES)
        """Total compute time by stage."""
        self._random = random
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._arrived_s: dict[int, float] = {}

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call at this time."""
        heappush(self._events, (time_s, next(self._numbers), call))

    def start(self, stage: int, after_s: float = START_S) -> None:
        """Start a worker for a stage."""
        name = f"w{next(self._numbers)}"
        self.workers[name] = Worker(stage, self.now_s)
        self.at(self.now_s + after_s, lambda: self._ready(name))
        self.at(self.now_s + after_s + self._random.expovariate(1 / MTBF_S), lambda: self._fail(name))

    def stop(self, name: str) -> None:
        """Drain a worker, then remove it."""
        worker = self.workers[name]
        worker.stopping = True
        if worker.ready:
            self._handle(ReplicaDraining(name))
        else:
            self._remove(name)

    def wanted(self) -> list[int]:
        """How many workers of each stage serve or are starting. Workers that are being stopped are not counted."""
        tally = Counter(worker.stage for worker in self.workers.values() if not worker.stopping)
        return [tally[stage] for stage in range(len(STAGES))]

    def run(self, arrivals: Iterator[float], until_s: float) -> None:
        """Run until there are no arrivals left and all requests are closed."""
        numbers = count(1)
        arrival_s = next(arrivals, inf)
        while arrival_s < until_s or self.scheduler.open_requests:
            wakeup_s = self.scheduler.next_wakeup_s()
            event_s = self._events[0][0] if self._events else inf
            self.now_s = max(self.now_s, min(arrival_s, event_s, inf if wakeup_s is None else wakeup_s))
            if arrival_s <= self.now_s:
                number = next(numbers)
                self._arrived_s[number] = self.now_s
                self._handle(RequestArrived(number, self.now_s + TIMEOUT_S))
                arrival_s = next(arrivals, inf)
            elif event_s <= self.now_s:
                heappop(self._events)[2]()
            else:
                self._handle(Tick())
        for worker in self.workers.values():
            self.result.worker_s += self.now_s - worker.started_s

    def _handle(self, event: Event) -> None:
        for action in self.scheduler.handle(event, self.now_s):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        result = self.result
        match action:
            case SendBatch():
                self._compute(action)
            case Answer():
                for request, _ in action.rows:
                    result.answered += 1
                    result.late += self.now_s - self._arrived_s.pop(request) > OBJECTIVE_S
            case Reject():
                result.refused[action.reason] += 1
                del self._arrived_s[action.request]
            case ReleaseReplica():
                self._remove(action.replica)

    def _compute(self, send: SendBatch) -> None:
        worker = self.workers[send.replica]
        first_s, further_s = STAGES[worker.stage]
        took_s = (first_s + further_s * (len(send.requests) - 1)) * self._random.lognormvariate(0, 0.1)
        worker.free_s = max(worker.free_s, self.now_s) + took_s
        self.at(worker.free_s, lambda: self._done(send, took_s))

    def _done(self, send: SendBatch, took_s: float) -> None:
        if send.replica in self.workers:
            self.computed_s[send.stage] += took_s
            self._handle(BatchDone(send.batch, send.replica, took_s, 0.0))

    def _ready(self, name: str) -> None:
        if (worker := self.workers.get(name)) is not None:
            worker.ready = True
            self._handle(ReplicaReady(name, worker.stage, "v1"))
            self.result.most_workers = max(self.result.most_workers, len(self.workers))

    def _fail(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is None:
            return
        self._remove(name)
        self._handle(ReplicaLost(name, "exit"))
        if not worker.stopping:
            self.start(worker.stage)

    def _remove(self, name: str) -> None:
        worker = self.workers.pop(name)
        self.result.worker_s += self.now_s - worker.started_s


Way = Callable[[Cluster], None]
"""Chooses the number of workers now."""


def by_replicas_wanted() -> Way:
    """The policy of `--autoscale` with the report of the leader."""
    least = LEAST_PER_STAGE * len(STAGES)
    policy = ScalingPolicy(Limits(least, MOST, LEAST_PER_STAGE, down_after_s=DOWN_AFTER_S))

    def scale(cluster: Cluster) -> None:
        shares = cluster.scheduler.replicas_wanted(cluster.now_s)
        serving = tuple(
            tuple(name for name, each in cluster.workers.items() if each.stage == stage and each.ready)
            for stage in range(len(STAGES))
        )
        workers = [name for name, each in cluster.workers.items() if not each.stopping]
        match policy.decide([CapacityReport(shares, serving)], workers, cluster.now_s):
            case Grow(number):
                for _ in range(number - len(workers)):
                    cluster.start(_emptiest(cluster.wanted(), shares))
            case Stop(name):
                cluster.stop(name)

    return scale


def by_cpu(*, of_each_stage: bool, target: float = 0.7) -> Way:
    """The rule of Kubernetes' HorizontalPodAutoscaler: workers times utilisation over the target, in steps of over 10 %."""
    before, history = [0.0] * len(STAGES), deque[tuple[float, list[int]]]()

    def scale(cluster: Cluster) -> None:
        have, now_s = cluster.wanted(), cluster.now_s
        computed_s = [after - earlier for after, earlier in zip(cluster.computed_s, before, strict=True)]
        before[:] = cluster.computed_s
        ready = Counter(worker.stage for worker in cluster.workers.values() if worker.ready)
        if of_each_stage:
            shares = [used_s / 15 / max(1, ready[stage]) for stage, used_s in enumerate(computed_s)]
        else:
            shares = [sum(computed_s) / 15 / max(1, ready.total())] * len(STAGES)
        need = [
            number if abs(share / target - 1) <= 0.1 else max(LEAST_PER_STAGE, ceil(number * share / target))
            for number, share in zip(have, shares, strict=True)
        ]
        history.append((now_s, need))
        while history[0][0] < now_s - DOWN_AFTER_S:
            history.popleft()
        _set(cluster, [min(MOST // 2, max(stage)) for stage in zip(*(each for _, each in history), strict=True)])

    return scale


def _emptiest(have: Sequence[int], shares: Sequence[float]) -> int:
    """The stage with the fewest workers for its load, as leaders place workers."""
    return min(range(len(have)), key=lambda stage: have[stage] / max(shares[stage], 0.01))


def _set(cluster: Cluster, need: Sequence[int]) -> None:
    for stage, (number, have) in enumerate(zip(need, cluster.wanted(), strict=True)):
        for _ in range(number - have):
            cluster.start(stage)
        if number < have:
            names = [name for name, each in cluster.workers.items() if each.stage == stage and not each.stopping]
            cluster.stop(names[-1])


def simulate(days: float, first: Sequence[int], period_s: float, way: Way | None) -> Result:
    """Simulate these days, beginning with `first` workers of each stage. `way` chooses their number each `period_s`; None: never."""
    cluster = Cluster(Random("workers"))
    for stage, number in enumerate(first):
        for _ in range(number):
            cluster.start(stage, after_s=0.0)

    def regularly() -> None:
        if way is not None:
            way(cluster)
            cluster.at(cluster.now_s + period_s, regularly)

    cluster.at(period_s, regularly)
    until_s = days * DAY_S
    cluster.run(Load(days, Random("load")).arrivals(until_s), until_s)
    return cluster.result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=2.0)
    parser.add_argument("--only", default="", help="only the ways whose name contains this")
    options = parser.parse_args()
    days = options.days
    least = [LEAST_PER_STAGE] * len(STAGES)
    ways: dict[str, tuple[list[int], float, Way | None]] = {
        "fixed, for the daily peak": ([3, 5], 15.0, None),
        "fixed, for the spikes": ([7, 13], 15.0, None),
        "CPU 70 %, all workers, every 15 s": (least, 15.0, by_cpu(of_each_stage=False)),
        "CPU 70 %, each stage, every 15 s": (least, 15.0, by_cpu(of_each_stage=True)),
        "CPU 90 %, each stage, every 15 s": (least, 15.0, by_cpu(of_each_stage=True, target=0.9)),
        "replicas wanted, every 15 s": (least, 15.0, by_replicas_wanted()),
        "replicas wanted, every 0.5 s": (least, 0.5, by_replicas_wanted()),
    }
    print("| way | requests | late | refused | worker-hours | most workers |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, (first, period_s, way) in ((name, way) for name, way in ways.items() if options.only in name):
        found = simulate(days, first, period_s, way)
        late, refused = found.late / found.requests, found.refused.total() / found.requests
        print(
            f"| {name} | {found.requests:,} | {late:.3%} | {refused:.3%} | {found.worker_s / 3600:.0f} | {found.most_workers} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
