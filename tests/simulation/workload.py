"""The external inputs of a run, drawn from its seed: requests, new workers and faults."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tests.simulation.faults import inject_fault
from tests.simulation.scenarios import CLIENTS, ComputeOutcome
from tests.simulation.workers import Worker

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulator

_BURST = 40
_THINK_TIME_S = 0.01
_MEAN_CANCEL_S = 0.1
"""Mean time from arrival to cancellation, for requests that are cancelled."""


class Workload:
    """Generates the arrivals, workers and faults of a scenario from the seed of the simulator."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._scenario = simulator.scenario
        self._event_queue = simulator.event_queue
        self._random = simulator.random_stream("chance")
        self._keys = simulator.random_stream("keys")
        self._requests = 0

    def begin(self) -> None:
        """Send one request before any worker is ready, then start the workers, then the load and the faults."""
        self._arrive()
        for stage in range(self._scenario.config.num_stages):
            for replica in range(self._scenario.replicas):
                delay_s = self._random.uniform(0.0, 0.1)
                self._event_queue.after(delay_s, partial(self._start, f"s{stage}r{replica}", stage))
        self._event_queue.after(0.2, self._start_load)
        for fault, rate in self._scenario.faults.items():
            self._plan(fault, rate)

    def request_closed(self) -> None:
        """In a closed loop, the client sends its next request after a think time."""
        if self._scenario.load == "closed" and self._event_queue.now_s > 0:
            self._event_queue.after(self._random.expovariate(1 / _THINK_TIME_S), self._arrive)

    # Clients.

    def _start_load(self) -> None:
        if self._scenario.load == "closed":
            for _ in range(CLIENTS):
                self._event_queue.after(self._random.uniform(0.0, 0.1), self._arrive)
        else:
            self._next_arrival()

    def _next_arrival(self) -> None:
        bursts = self._scenario.load == "bursts"
        for _ in range(self._random.choice((1, 1, 1, _BURST)) if bursts else 1):
            self._arrive()
        rate = self._scenario.rate / ((3 + _BURST) / 4 if bursts else 1)
        self._event_queue.after(self._random.expovariate(rate), self._next_arrival)

    def _arrive(self) -> None:
        if self._simulator.ending:
            return
        self._requests += 1
        cancelled = self._random.random() < self._scenario.cancelled
        self._simulator.arrive(
            self._requests,
            self._random.uniform(*self._scenario.timeout_s),
            self._draw_key(),
            self._draw_outcome(),
            self._random.expovariate(1 / _MEAN_CANCEL_S) if cancelled else None,
        )

    def _draw_key(self) -> str:
        """Some keys are common and some are rare."""
        number = int(self._scenario.keys * self._keys.random() ** 3)
        return str(number) if number else ""

    def _draw_outcome(self) -> ComputeOutcome:
        draw = self._random.random()
        for compute_outcome, share in self._scenario.outcomes.items():
            if draw < share:
                return compute_outcome
            draw -= share
        return "answer"

    # Workers.

    def _start(self, name: str, stage: int) -> None:
        simulator = self._simulator
        if not simulator.ending:
            worker = simulator.workers[name] = Worker(simulator, name, stage)
            worker.version = max(each.version for each in simulator.workers.values())
            worker.start()

    # Faults.

    def _plan(self, fault: str, rate: float) -> None:
        self._event_queue.after(self._random.expovariate(rate), partial(self._inject_fault, fault, rate))

    def _inject_fault(self, fault: str, rate: float) -> None:
        if self._simulator.ending:
            return
        if self._simulator.workers:
            worker = self._random.choice(tuple(self._simulator.workers))
            parameters = Random(self._random.getrandbits(32))
            self._simulator.faults_injected += inject_fault(self._simulator, fault, worker, parameters)
        self._plan(fault, rate)
