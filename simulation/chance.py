"""Chance as the source of what happens: clients that ask, workers that join, misfortunes that strike."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from simulation.injections import Arrival, Start, Strike
from simulation.scenario import Fate, Fault

if TYPE_CHECKING:
    from simulation.simulator import Simulator

_BURST = 40
_STORM = 30
_THINKING_S = 0.01
_PATIENCE_S = 0.1
"""After which, on the mean, those clients go away who do."""


class Chance:
    """Makes a scenario's injections up, one after the other, from the simulator's seed."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._scenario = simulator.scenario
        self._agenda = simulator.agenda
        self._random = simulator.chance_of("chance")
        self._requests = 0
        self._extra_workers = 0

    def begin(self) -> None:
        """Somebody asks before anybody can serve; then the workers join; then the load and the misfortunes begin."""
        self._arrive()
        for stage in range(self._scenario.config.num_stages):
            for replica in range(self._scenario.replicas):
                delay_s = self._random.uniform(0.0, 0.1)
                self._agenda.after(delay_s, partial(self._start, f"s{stage}r{replica}", stage))
        self._agenda.after(0.2, self._start_load)
        for fault, rate in self._scenario.faults.items():
            self._plan(fault, rate)

    def request_closed(self) -> None:
        """In a closed loop, its client thinks and asks again."""
        if self._scenario.load == "closed" and self._agenda.now_s > 0:
            self._agenda.after(self._random.expovariate(1 / _THINKING_S), self._arrive)

    # Clients.

    def _start_load(self) -> None:
        if self._scenario.load == "closed":
            for _ in range(self._scenario.clients):
                self._agenda.after(self._random.uniform(0.0, 0.1), self._arrive)
        else:
            self._next_arrival()

    def _next_arrival(self) -> None:
        bursts = self._scenario.load == "bursts"
        for _ in range(self._random.choice((1, 1, 1, _BURST)) if bursts else 1):
            self._arrive()
        rate = self._scenario.rate / ((3 + _BURST) / 4 if bursts else 1)
        self._agenda.after(self._random.expovariate(rate), self._next_arrival)

    def _arrive(self, timeout_s: float | None = None) -> None:
        if self._simulator.ending:
            return
        self._requests += 1
        cancelled = self._random.random() < self._scenario.cancelled
        self._simulator.inject(
            Arrival(
                self._agenda.now_s,
                self._requests,
                timeout_s or self._random.uniform(*self._scenario.timeout_s),
                self._fate(),
                self._random.expovariate(1 / _PATIENCE_S) if cancelled else None,
            )
        )

    def _fate(self) -> Fate:
        scenario, draw = self._scenario, self._random.random()
        shares: tuple[tuple[Fate, float], ...] = (
            ("kill", scenario.poison),
            ("hang", scenario.hanging),
            ("raise", scenario.failing),
        )
        for fate, share in shares:
            if 0 <= draw < share:
                return fate
            draw -= share
        return "answer"

    # Workers.

    def _start(self, worker: str, stage: int) -> None:
        self._simulator.inject(Start(self._agenda.now_s, worker, stage))

    def _start_another(self) -> None:
        scenario = self._scenario
        if len(self._simulator.workers) < 4 * scenario.replicas * scenario.config.num_stages:
            self._extra_workers += 1
            self._start(f"extra{self._extra_workers}", self._random.randrange(scenario.config.num_stages))

    # Misfortunes.

    def _plan(self, fault: Fault, rate: float) -> None:
        self._agenda.after(self._random.expovariate(rate), partial(self._strike, fault, rate))

    def _strike(self, fault: Fault, rate: float) -> None:
        if self._simulator.ending:
            return
        if fault == "join":
            self._start_another()
        elif fault == "storm":
            for _ in range(_STORM):
                self._arrive(timeout_s=self._random.uniform(0.0005, 0.05))
        elif self._simulator.workers:
            worker = self._random.choice(tuple(self._simulator.workers))
            self._simulator.inject(Strike(self._agenda.now_s, fault, worker, self._random.getrandbits(32)))
        self._plan(fault, rate)
