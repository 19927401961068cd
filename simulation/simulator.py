"""A discrete-event simulation around the real scheduler: the same seed gives the same run, event for event."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Protocol

from server.scheduler import (
    Action,
    Answer,
    BreakLink,
    CloseLink,
    Drain,
    Event,
    Refuse,
    RequestArrived,
    RequestCancelled,
    Scheduler,
    SchedulerConfig,
    SendBatch,
    Tick,
)
from simulation.agenda import Agenda
from simulation.chance import Chance
from simulation.checker import Checker
from simulation.injections import Arrival, Injection, Recording, Start, Strike
from simulation.misfortunes import strike
from simulation.playback import Playback
from simulation.scenario import Fate, Scenario
from simulation.workers import Worker

_SETTLING_S = 300.0


class Observer(Protocol):
    """Sees all that goes into the scheduler and comes out."""

    def check(self, event: Event, actions: list[Action], now_s: float, wakeup_s: float | None) -> None:
        """One event, what the scheduler made of it, and when it wants to be woken."""

    def check_finished(self) -> None:
        """The run is over and no request is open."""


class Simulator:
    """Plays the shell, the workers and the clients of one scenario.

    What chance decides comes from the seed when the simulator is made to `run`, and from a recording when it is made
    to `play`; how long computing and messages take comes from the seed in both cases. A whole recording played with the
    seed that it was made with gives the same run.

    Args:
        scheduler: makes the scheduler; a test plants bugs here.
        observe: makes what watches it. The default asserts the scheduler's promises.
    """

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        *,
        scheduler: Callable[[SchedulerConfig], Scheduler] = Scheduler,
        observe: Callable[[Scheduler], Observer] = Checker,
    ) -> None:
        self.scenario = scenario
        self.seed = seed
        self.agenda = Agenda()
        self.scheduler = scheduler(scenario.config)
        self.observer = observe(self.scheduler)
        self.events = 0
        """Given to the scheduler."""
        self.trace: list[tuple[float, Event, list[Action]]] | None = None
        """Set to a list to have all events and actions noted there."""
        self.fates: dict[int, Fate] = {}
        """What happens to who computes this request; those without an entry are healthy."""
        self.outcomes: dict[int, str] = {}
        """What became of each request: "answered", "cancelled" or the reason of its refusal."""
        self.open: dict[int, None] = {}
        """Requests without outcome, in order of arrival."""
        self.workers: dict[str, Worker] = {}
        self.workers_by_link: dict[str, Worker] = {}
        self.struck = 0
        """Misfortunes that had an effect."""
        self.ending = False
        """No more arrivals or misfortunes."""
        self.injected: list[Injection] = []
        self._random = self.chance_of("shell")
        self._source: Chance | Playback
        self._wakeup_s: float | None = None

    def run(self, max_events: int) -> None:
        """Run for so many events by chance, then let things settle and check that nothing is left behind."""
        self._source = Chance(self)
        self._source.begin()
        while self.events < max_events and self.agenda.step():
            pass
        self._settle()

    def play(self, recording: Recording) -> None:
        """Do what is recorded, then let things settle and check that nothing is left behind."""
        self._source = Playback(self, recording)
        self._source.begin()
        while self.agenda.next_s <= recording.ended_s:
            self.agenda.step()
        self.agenda.now_s = recording.ended_s
        self._settle()

    @property
    def recording(self) -> Recording:
        """What has been injected so far."""
        return Recording(tuple(self.injected), self.agenda.now_s if not self.ending else self._ended_s)

    def chance_of(self, name: str) -> Random:
        """A stream of random numbers of its own, so that what is left out of one leaves the others as they are."""
        return Random(f"{self.scenario.name}/{self.seed}/{name}")

    def lag_s(self, random: Random) -> float:
        """How long a message or a timer takes."""
        return random.expovariate(1 / self.scenario.network_s) if self.scenario.network_s else 0.0

    def inject(self, injection: Injection) -> None:
        """Something happens to the service, now."""
        if self.ending:
            return
        self.injected.append(injection)
        match injection:
            case Arrival():
                self._arrive(injection)
            case Start():
                self._start(injection)
            case Strike():
                self.struck += strike(self, injection)

    def deliver(self, event: Event) -> None:
        """Give the scheduler an event, have it checked what it makes of it, and carry that out."""
        now_s = self.agenda.now_s
        actions = self.scheduler.handle(event, now_s)
        self.events += 1
        if self.trace is not None:
            self.trace.append((now_s, event, actions))
        wakeup_s = self.scheduler.next_wakeup_s()
        self.observer.check(event, actions, now_s, wakeup_s)
        for action in actions:
            self._perform(action)
        if wakeup_s is not None and (self._wakeup_s is None or wakeup_s < self._wakeup_s):
            self._plan_tick(wakeup_s)

    def cancel(self, request: int) -> None:
        """The client goes away, if it is still there."""
        if request in self.open:
            self._close(request, "cancelled")
        self.deliver(RequestCancelled(request))

    def fate_of(self, send: SendBatch) -> Fate:
        """What computing this batch leads to."""
        for request in send.requests if self.fates else ():
            if request in self.fates:
                return self.fates[request]
        return "answer"

    def _perform(self, action: Action) -> None:
        match action:
            case SendBatch():
                receive = self.workers_by_link[action.link].receive
                self.agenda.after(self.lag_s(self._random), partial(receive, action))
            case Answer():
                for request, _ in action.rows:
                    self._close(request, "answered")
            case Refuse():
                self._close(action.request, action.reason)
            case BreakLink():
                self.workers_by_link[action.link].broken(action.link)
            case CloseLink():
                self.workers_by_link[action.link].closed(action.link)

    def _arrive(self, arrival: Arrival) -> None:
        request = arrival.request
        self.open[request] = None
        if arrival.fate != "answer":
            self.fates[request] = arrival.fate
        if arrival.cancel_after_s is not None:
            self.agenda.after(arrival.cancel_after_s, partial(self.cancel, request))
        self.deliver(RequestArrived(request, arrival.at_s + arrival.timeout_s))

    def _close(self, request: int, outcome: str) -> None:
        del self.open[request]
        self.outcomes[request] = outcome
        self._source.request_closed()

    def _start(self, start: Start) -> None:
        if start.worker not in self.workers:
            worker = self.workers[start.worker] = Worker(self, start.worker, start.stage)
            worker.version = max(each.version for each in self.workers.values())
            worker.start()

    # Time.

    def _plan_tick(self, wakeup_s: float) -> None:
        """The shell's timer fires a little late."""
        self._wakeup_s = wakeup_s
        self.agenda.at(max(wakeup_s, self.agenda.now_s) + self.lag_s(self._random), partial(self._tick, wakeup_s))

    def _tick(self, wakeup_s: float) -> None:
        if self._wakeup_s == wakeup_s:
            self._wakeup_s = None
            self.deliver(Tick())

    def _settle(self) -> None:
        """No more arrivals or misfortunes; everybody recovers; all must be closed in the end."""
        self._ended_s = self.agenda.now_s
        self.ending = True
        while self.scheduler.open_requests:
            assert self.agenda.step(), "nothing more will happen and requests are open"
            assert self.agenda.now_s < self._ended_s + _SETTLING_S, "requests stay open for ever"
        assert not self.open, "a request got neither answer nor refusal"
        self.deliver(Drain())
        late = max(self.outcomes, default=0) + 1
        self._arrive(Arrival(self.agenda.now_s, late, 1.0))
        assert self.outcomes[late] == "draining", "accepted while draining"
        self.observer.check_finished()
