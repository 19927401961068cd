"""A discrete-event simulation of a cluster around the real scheduler. The same seed gives the same sequence of events."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from random import Random

from multiworld_serving.server.leader.scheduling.actions import (
    Action,
    Answer,
    FailReplica,
    FreeBatch,
    KeepOutput,
    Reject,
    ReleaseReplica,
    SendBatch,
)
from multiworld_serving.server.leader.scheduling.events import (
    BatchDone,
    Drain,
    Event,
    RequestArrived,
    RequestCancelled,
    Tick,
)
from multiworld_serving.server.leader.scheduling.scheduler import Scheduler
from tests.simulation.data_plane import DataPlane
from tests.simulation.invariants.checker import Checker
from tests.simulation.scenarios import NETWORK_S, ComputeOutcome, Scenario
from tests.simulation.workers import Worker
from tests.simulation.workload import Workload

Trace = list[tuple[float, Event, list[Action]]]
"""Every event with its time and the resulting actions."""
_EXPECTED_REFUSALS = {"kill": {"poison"}, "hang": {"poison"}, "raise": {"stage_error"}}
_SETTLE_TIMEOUT_S = 300.0


class EventQueue:
    """Callbacks ordered by virtual time; callbacks with equal times run in insertion order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        """Schedule a callback `delay_s` from now."""
        self.at(self.now_s + delay_s, do)

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        """Schedule a callback at `time_s`, which must not be in the past."""
        self._count += 1
        heappush(self._entries, (time_s, self._count, do))

    def step(self) -> bool:
        """Advance the clock to the next callback and run it; returns False if the queue is empty."""
        if not self._entries:
            return False
        self.now_s, _, do = heappop(self._entries)
        do()
        return True


class Simulator:
    """Simulates the scheduler driver, the workers and the clients of one scenario."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.seed = seed
        self.event_queue = EventQueue()
        self.scheduler = Scheduler(scenario.config)
        self._checker = Checker(self.scheduler)
        self.events = 0
        """Number of events passed to the scheduler."""
        self.trace: Trace | None = None
        """If set to a list, every event is appended with its time and actions."""
        self.compute_outcomes: dict[int, ComputeOutcome] = {}
        """Compute outcome by request; requests without an entry are healthy."""
        self.outcomes: dict[int, str] = {}
        """Result by request: "answered", "cancelled" or the reason of the rejection."""
        self.open: dict[int, tuple[float, str]] = {}
        """Requests without a result, in order of arrival, with their deadline and key."""
        self.workers: dict[str, Worker] = {}
        self.workers_by_link: dict[str, Worker] = {}
        self.data_plane = DataPlane(self)
        self.faults_injected = 0
        """Number of faults that had an effect."""
        self.ending = False
        """True once arrivals and faults have stopped."""
        self._random = self.random_stream("shell")
        self._workload = Workload(self)
        self._wakeup_s: float | None = None

    def run(self, max_events: int) -> None:
        """Run a random workload for `max_events` events, then drain and check that nothing is left."""
        self._workload.begin()
        while self.events < max_events and self.event_queue.step():
            pass
        self._settle()

    def random_stream(self, name: str) -> Random:
        """An independent stream of random numbers: draws from one stream do not affect the others. The name is part of its seed."""
        return Random(f"{self.scenario.name}/{self.seed}/{name}")

    def message_delay_s(self, random: Random) -> float:
        """A random delay of one message or timer."""
        return random.expovariate(1 / NETWORK_S)

    def deliver(self, event: Event) -> None:
        """Pass an event to the scheduler, check the invariants, and perform the actions."""
        now_s = self.event_queue.now_s
        actions = self.scheduler.handle(event, now_s)
        self.events += 1
        if self.trace is not None:
            self.trace.append((now_s, event, actions))
        wakeup_s = self.scheduler.next_wakeup_s()
        self._checker.check(event, actions, now_s, wakeup_s)
        for action in actions:
            self._perform(action, event)
        if isinstance(event, BatchDone) and event.kept and not any(isinstance(each, KeepOutput) for each in actions):
            self.data_plane.release(event.replica, event.batch)
        if wakeup_s is not None and (self._wakeup_s is None or wakeup_s < self._wakeup_s):
            self._schedule_tick(wakeup_s)

    def cancel(self, request: int) -> None:
        """Cancel a request on behalf of its client."""
        if request in self.open:
            self.close(request, "cancelled")
        self.deliver(RequestCancelled(request))

    def compute_outcome_of(self, send: SendBatch) -> ComputeOutcome:
        """The outcome of computing this batch: that of its first request that is not healthy."""
        outcomes = (self.compute_outcomes[request] for request in send.requests if request in self.compute_outcomes)
        return next(outcomes, "answer")

    def _perform(self, action: Action, event: Event) -> None:
        match action:
            case SendBatch():
                receive = self.workers_by_link[action.replica].receive
                holder = self.data_plane.holder_of(action.batch)
                self.event_queue.after(self.message_delay_s(self._random), partial(receive, action, holder))
            case KeepOutput():
                self.data_plane.keep_output(action, event)
            case FreeBatch():
                self.data_plane.free(action.batch)
            case Answer():
                for request, _ in action.rows:
                    self.close(request, "answered")
            case Reject():
                self.close(action.request, action.reason)
            case FailReplica():
                self.workers_by_link[action.replica].broken(action.replica)
            case ReleaseReplica():
                self.workers_by_link[action.replica].closed(action.replica)

    def arrive(
        self, request: int, timeout_s: float, key: str, compute_outcome: ComputeOutcome, cancel_after_s: float | None
    ) -> None:
        """A client sends a request."""
        self.open[request] = self.event_queue.now_s + timeout_s, key
        if compute_outcome != "answer":
            self.compute_outcomes[request] = compute_outcome
        if cancel_after_s is not None:
            self.event_queue.after(cancel_after_s, partial(self.cancel, request))
        self.submit(request)

    def submit(self, request: int, kind: str = "") -> None:
        """A frontend sends a request to the leader, unless its client has cancelled it. Only requests of one kind share a batch."""
        if request in self.open:
            deadline_s, key = self.open[request]
            self.deliver(RequestArrived(request, deadline_s, kind + key))

    def close(self, request: int, outcome: str) -> None:
        """Record the result of a request."""
        del self.open[request]
        self.outcomes[request] = outcome
        self._workload.request_closed()

    # Time.

    def _schedule_tick(self, wakeup_s: float) -> None:
        """Schedule a wakeup; like a real timer it fires slightly late."""
        self._wakeup_s = wakeup_s
        self.event_queue.at(
            max(wakeup_s, self.event_queue.now_s) + self.message_delay_s(self._random), partial(self._tick, wakeup_s)
        )

    def _tick(self, wakeup_s: float) -> None:
        if self._wakeup_s == wakeup_s:
            self._wakeup_s = None
            self.deliver(Tick())

    def _settle(self) -> None:
        """Stop arrivals and faults, let all workers recover; assert that every request is closed and every output released."""
        ended_s = self.event_queue.now_s
        self.ending = True
        while self.open or self.scheduler.open_requests or not self.data_plane.idle:
            what = "requests are open" if self.open else "outputs are retained"
            assert self.event_queue.step(), f"{what} and no further event is scheduled"
            assert self.event_queue.now_s < ended_s + _SETTLE_TIMEOUT_S, (
                f"{what} {_SETTLE_TIMEOUT_S:g} s after the load ended"
            )
        self.deliver(Drain())
        self._checker.check_finished()


def run_case(scenario: Scenario, seed: int, max_events: int, *, trace: Trace | None = None) -> Simulator:
    """Run a random workload and check it.

    Args:
        trace: gets the events and actions.
    Raises:
        AssertionError, Exception: the scheduler broke an invariant, or failed. A note says how to reproduce it.
    """
    simulator = Simulator(scenario, seed)
    simulator.trace = trace
    try:
        simulator.run(max_events)
        check_outcomes(simulator)
    except Exception as error:
        at = f"{scenario.name}, seed {seed}, event {simulator.events}, t={simulator.event_queue.now_s:.6f} s"
        options = f"--scenario {scenario.name} --seed {seed} --events {max_events} --trace"
        error.add_note(f"{at}\nreplay: python -m tests.simulation {options}")
        raise
    return simulator


def check_outcomes(simulator: Simulator) -> None:
    """Assert that every request got a result that the scenario allows. Raises AssertionError."""
    scenario, outcomes, compute_outcomes = simulator.scenario, simulator.outcomes, simulator.compute_outcomes
    always_allowed = {"cancelled", "not_ready", *scenario.allowed_refusals}
    healthy = {outcome for request, outcome in outcomes.items() if request not in compute_outcomes}
    wrong = healthy - always_allowed - {"answered"}
    assert not wrong, f"healthy requests were refused as {sorted(wrong)}"
    for request, compute_outcome in compute_outcomes.items():
        allowed = always_allowed | _EXPECTED_REFUSALS[compute_outcome]
        assert outcomes[request] in allowed, f"a request with compute outcome {compute_outcome} was {outcomes[request]}"
