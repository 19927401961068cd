"""Requests of sessions: they go to the replicas that keep the session, share batches, and are rejected when one of these is gone."""

import pytest

from multiworld_serving.server.leader.scheduling.actions import Answer, Reject, SendBatch
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from multiworld_serving.server.leader.scheduling.events import (
    BatchDone,
    BatchFailed,
    Event,
    ReplicaDraining,
    ReplicaLost,
    ReplicaReady,
    RequestArrived,
    RequestCancelled,
    Tick,
)
from multiworld_serving.server.leader.scheduling.scheduler import Scheduler

ROUTE = ("a1", "b1")


class Run:
    """A scheduler with two replicas of each of two stages, and what it does."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.scheduler = Scheduler(SchedulerConfig(num_stages=2, max_batch_size=4))
        for name in ("a0", "a1", "b0", "b1"):
            self.handle(ReplicaReady(name, int(name[0] == "b"), "v"))

    def handle(self, event: Event, after_s: float = 0.001) -> list[object]:
        self.now_s += after_s
        return list(self.scheduler.handle(event, self.now_s))

    def arrive(self, request: int, route: tuple[str, ...] = ROUTE) -> list[object]:
        return self.handle(RequestArrived(request, self.now_s + 100, route=route))


def sent(actions: list[object]) -> list[tuple[str, tuple[int, ...]]]:
    return [(each.replica, each.requests) for each in actions if isinstance(each, SendBatch)]


def lost(actions: list[object]) -> list[int]:
    return [each.request for each in actions if isinstance(each, Reject) and each.reason == "session_lost"]


def batch_of(actions: list[object]) -> int:
    return next(each.batch for each in actions if isinstance(each, SendBatch))


def test_steps_go_to_their_replicas_and_those_that_wait_share_the_next_batch() -> None:
    run = Run()
    first = run.arrive(1)
    assert sent(first) == [("a1", (1,))]
    assert sent(run.arrive(2)) == sent(run.arrive(3)) == sent(run.arrive(4)) == []
    done = run.handle(BatchDone(batch_of(first), "a1"))
    assert sent(done) == [("b1", (1,)), ("a1", (2, 3, 4))]
    answered = run.handle(BatchDone(batch_of(first), "b1"))
    assert [each.rows for each in answered if isinstance(each, Answer)] == [((1, 0),)]


def test_steps_wait_for_the_next_ones_of_the_last_batch_for_half_of_its_time_and_at_most_20_ms() -> None:
    run, route = Run(), ("b1",)
    batch = batch_of(run.arrive(1, route))
    for request in (2, 3):
        run.arrive(request, route)
    run.now_s = 1.0
    assert sent(run.handle(BatchDone(batch, "b1"))) == []
    both = run.arrive(4, route)  # the next one of the session that was answered
    assert sent(both) == [("b1", (2, 3, 4))]
    run.arrive(5, route)
    run.now_s = 2.0
    assert sent(run.handle(BatchDone(batch_of(both), "b1"))) == []
    assert sent(run.arrive(6, route)) == []
    due_s = run.scheduler.next_wakeup_s()
    assert due_s is not None
    assert due_s == pytest.approx(2.021)
    last = run.handle(Tick(), due_s - run.now_s)
    assert sent(last) == [("b1", (5, 6))]
    run.arrive(7, route)
    assert sent(run.handle(BatchDone(batch_of(last), "b1"), 0.009)) == []
    assert run.scheduler.next_wakeup_s() == pytest.approx(run.now_s + 0.005)


@pytest.mark.parametrize("route", [("a1",), ("b1", "b1"), ("a1", "b9"), ("a9", "b1"), ("a1", "b1", "c1")])
def test_a_step_whose_replicas_are_unknown_is_rejected(route: tuple[str, ...]) -> None:
    assert lost(Run().arrive(1, route)) == [1]


def test_a_step_of_a_session_that_only_the_last_stage_keeps_begins_there() -> None:
    run = Run()
    first = run.arrive(1, ("b1",))
    assert sent(first) == [("b1", (1,))]
    assert sent(run.arrive(2, ("b1",))) == []
    assert [(each.stage, each.kind) for each in first if isinstance(each, SendBatch)] == [(1, "first")]
    run.handle(ReplicaLost("a1", "exit"))
    run.handle(ReplicaLost("a0", "exit"))  # the stage before does not matter
    answered = run.handle(BatchDone(batch_of(first), "b1"))
    assert [each.rows for each in answered if isinstance(each, Answer)] == [((1, 0),)]
    assert sent(run.arrive(3, ("b1",))) == [("b1", (2, 3))]
    assert sorted(lost(run.handle(ReplicaLost("b1", "exit")))) == [2, 3]
    assert run.scheduler.open_requests == 0


@pytest.mark.parametrize("gone", [ReplicaLost("b1", "exit"), ReplicaDraining("b1"), ReplicaLost("a1", "exit")])
def test_steps_in_flight_waiting_and_new_ones_are_rejected_when_a_replica_of_the_route_is_gone(gone: Event) -> None:
    run = Run()
    for request in range(1, 6):
        run.arrive(request)
    actions = run.handle(gone)
    later = [*actions, *run.handle(Tick())]
    if isinstance(gone, ReplicaLost) and gone.replica == "a1":
        assert sorted(lost(later)) == [1, 2, 3, 4, 5]
    else:
        assert sorted(lost(later)) == [2, 3, 4, 5]  # the other one is at stage 0, and is rejected when it returns
    assert lost(run.arrive(9)) == [9]
    assert not [replica for replica, requests in sent(later) if 9 not in requests]


def test_a_batch_at_an_earlier_stage_is_rejected_when_the_next_replica_is_gone() -> None:
    run = Run()
    batch = batch_of(run.arrive(1))
    run.handle(ReplicaLost("b1", "exit"))
    assert lost(run.handle(BatchDone(batch, "a1"))) == [1]
    assert run.scheduler.open_requests == 0


def test_a_step_that_raised_is_not_computed_again_because_the_session_may_have_it() -> None:
    run = Run()
    batch = batch_of(run.arrive(1))
    actions = run.handle(BatchFailed(batch, "a1", "error"))
    assert (lost(actions), sent(actions)) == ([1], [])


def test_a_step_is_never_hedged() -> None:
    run = Run()
    for number in range(20):
        batch = batch_of(run.arrive(number))
        run.handle(BatchDone(batch, "a1", 0.001))
        run.handle(BatchDone(batch, "b1", 0.001))
    run.arrive(100)
    assert sent(run.handle(Tick(), after_s=5)) == []


def test_a_cancelled_step_leaves_its_batch_and_its_queue() -> None:
    run = Run()
    for request in range(1, 5):
        run.arrive(request)
    for request in range(1, 5):
        run.handle(RequestCancelled(request))
    assert run.scheduler.open_requests == 0
    assert not run.scheduler.steps


def test_other_requests_are_not_kept_from_the_replicas_of_sessions() -> None:
    run = Run()
    for request in range(1, 9):
        run.arrive(request)
    assert sent(run.handle(RequestArrived(50, run.now_s + 10))) == [("a0", (50,))]
