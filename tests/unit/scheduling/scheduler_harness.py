"""Drives a scheduler step by step: events in, actions out, at times that the test chooses."""

from collections.abc import Iterable
from typing import Any, TypeVar

from multiworld_serving.server.leader.scheduling import events
from multiworld_serving.server.leader.scheduling.actions import Action, Answer, Reject, SendBatch
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from multiworld_serving.server.leader.scheduling.scheduler import Scheduler

A = TypeVar("A")


class SchedulerHarness:
    """A scheduler with `replicas` links per stage, named s<stage>r<replica>, all ready.

    By default it neither waits for batches to fill nor hedges.
    """

    def __init__(self, *, stages: int = 1, replicas: int = 2, **config: Any) -> None:
        defaults: dict[str, Any] = {"batch_timeout_s": 0.0, "adaptive_batching": False, "hedge_factor": None}
        self.scheduler = Scheduler(SchedulerConfig(stages, **{**defaults, **config}))
        self.now_s = 0.0
        self.requests = 0
        self.in_flight: dict[tuple[int, str], SendBatch] = {}
        for stage in range(stages):
            for replica in range(replicas):
                self.ready(f"s{stage}r{replica}", stage)

    def handle(self, event: events.Event, after_s: float = 0.0) -> list[Action]:
        self.now_s += after_s
        actions = self.scheduler.handle(event, self.now_s)
        if isinstance(event, events.BatchDone | events.BatchFailed):
            self.in_flight.pop((event.batch, event.replica), None)
        elif isinstance(event, events.ReplicaLost):
            self.in_flight = {key: send for key, send in self.in_flight.items() if send.replica != event.replica}
        self.in_flight.update({(send.batch, send.replica): send for send in sends(actions)})
        return actions

    def arrive(self, count: int = 1, timeout_s: float = 100.0, key: str = "") -> list[Action]:
        """Submit this many requests, numbered from 1."""
        actions = []
        for _ in range(count):
            self.requests += 1
            actions += self.handle(events.RequestArrived(self.requests, self.now_s + timeout_s, key))
        return actions

    def ready(self, link: str, stage: int = 0, version: str = "v1") -> list[Action]:
        return self.handle(events.ReplicaReady(link, stage, version))

    def done(self, send: SendBatch, after_s: float = 0.0, *, kept: bool = False) -> list[Action]:
        return self.handle(events.BatchDone(send.batch, send.replica, kept=kept), after_s)

    def failed(self, send: SendBatch, error: str = "ValueError: no", *, by_input: bool = False) -> list[Action]:
        return self.handle(events.BatchFailed(send.batch, send.replica, error, by_input=by_input))

    def not_sent(self, send: SendBatch) -> list[Action]:
        return self.handle(events.BatchFailed(send.batch, send.replica, "MemoryError: no room", sent=False))

    def broken(self, link: str, cause: str = "exit") -> list[Action]:
        return self.handle(events.ReplicaLost(link, cause))

    def draining(self, link: str) -> list[Action]:
        return self.handle(events.ReplicaDraining(link))

    def wait(self, seconds: float) -> list[Action]:
        """Advance time, with a tick at each requested wake-up."""
        end_s = self.now_s + seconds
        actions = []
        while (wakeup_s := self.scheduler.next_wakeup_s()) is not None and wakeup_s <= end_s:
            assert wakeup_s > self.now_s, "a wakeup that is not in the future"
            self.now_s = wakeup_s
            actions += self.handle(events.Tick())
        self.now_s = end_s
        return actions + self.handle(events.Tick())

    def answer_all(self, actions: Iterable[Action], after_s: float = 0.01) -> list[Action]:
        """Answer batches until none is in flight. Returns all actions after the first."""
        pending, seen = sends(actions), []
        while pending:
            more = self.done(pending.pop(0), after_s)
            seen += more
            pending += sends(more)
        return seen


def only(actions: Iterable[Action], kind: type[A]) -> A:
    """The single action of its type."""
    (found,) = of(actions, kind)
    return found


def of(actions: Iterable[Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def sends(actions: Iterable[Action]) -> list[SendBatch]:
    return of(actions, SendBatch)


def answered(actions: Iterable[Action]) -> list[int]:
    """Answered requests, in order."""
    return [request for answer in of(actions, Answer) for request, _ in answer.rows]


def rejected(actions: Iterable[Action]) -> dict[int, str]:
    """Rejected requests and the reasons."""
    return {rejection.request: rejection.reason for rejection in of(actions, Reject)}
