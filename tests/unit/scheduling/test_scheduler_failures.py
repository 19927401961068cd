"""Links that break, hang or leave, and stages that raise."""

from __future__ import annotations

import pytest

from multiworld_serving.server.scheduling.actions import FailReplica, FreeBatch, Reject, ReleaseReplica, SendBatch
from tests.unit.scheduling.scheduler_harness import SchedulerHarness, answered, of, only, rejected, sends


def test_batch_is_rerouted_when_its_link_breaks() -> None:
    driver = SchedulerHarness(stages=2)
    first = only(driver.arrive(), SendBatch)
    second = only(driver.done(first), SendBatch)
    driver.now_s += 0.5
    again = only(driver.broken(second.replica), SendBatch)
    assert (again.batch, again.stage, again.kind, again.attempt) == (first.batch, 1, "reroute", 2)
    assert again.replica != second.replica
    assert answered(driver.done(again)) == [1]
    assert driver.scheduler.counters.reroutes == {1: 1}


def test_batches_of_a_broken_link_keep_their_order() -> None:
    driver = SchedulerHarness(replicas=1, window=3, max_batch_size=1)
    driver.arrive(5)
    assert driver.broken("s0r0") == []
    driver.now_s += 0.25
    again = sends(driver.ready("s0r1"))
    assert [send.requests for send in again] == [(1,), (2,), (3,)]
    assert [send.waited_s for send in again] == [0.25] * 3


def test_rerouted_batch_goes_before_waiting_ones() -> None:
    driver = SchedulerHarness(stages=2, replicas=1, window=1, max_batch_size=1)
    driver.ready("s1r1", 1)
    first = only(driver.arrive(9), SendBatch)
    at_stage_1 = []
    stage_0 = [first]
    for _ in range(3):  # two in flight in stage 1, one waiting
        more = sends(driver.done(stage_0[-1]))
        at_stage_1 += [send for send in more if send.stage == 1]
        stage_0 += [send for send in more if send.stage == 0]
    driver.broken(at_stage_1[0].replica)
    again = next(send for send in sends(driver.done(at_stage_1[1])) if send.stage == 1)
    assert again.batch == at_stage_1[0].batch


def test_link_is_broken_when_silent_beyond_the_hang_timeout() -> None:
    driver = SchedulerHarness(hang_timeout_s=2.0)
    send = only(driver.arrive(), SendBatch)
    assert driver.wait(1.99) == []
    actions = driver.wait(0.02)
    assert actions[0] == FailReplica(send.replica, "hang")
    again = only(actions, SendBatch)
    assert again.replica != send.replica
    assert driver.broken(send.replica, "aborted") == []
    assert driver.done(send) == []
    assert answered(driver.done(again)) == [1]


def test_hang_timeout_is_not_extended_by_further_batches() -> None:
    driver = SchedulerHarness(replicas=1, hang_timeout_s=2.0)
    driver.arrive()
    driver.wait(1.5)
    driver.arrive()
    assert driver.scheduler.next_wakeup_s() == 2.0
    assert of(driver.wait(0.6), FailReplica) == [FailReplica("s0r0", "hang")]


def test_idle_link_is_not_broken_by_time() -> None:
    driver = SchedulerHarness(hang_timeout_s=2.0)
    driver.answer_all(driver.arrive())
    assert driver.wait(100.0) == []


def test_draining_link_finishes_its_batches_and_is_closed() -> None:
    driver = SchedulerHarness(replicas=2, max_batch_size=1)
    first = only(driver.arrive(), SendBatch)
    assert driver.draining(first.replica) == []
    assert all(send.replica != first.replica for send in sends(driver.arrive(3)))
    actions = driver.done(first)
    assert answered(actions) == [1]
    assert of(actions, ReleaseReplica) == [ReleaseReplica(first.replica)]
    assert driver.broken(first.replica, "left") == []


def test_no_request_is_blamed_when_links_leave_or_break_while_draining() -> None:
    driver = SchedulerHarness(replicas=9, max_attempts=2)
    send = only(driver.arrive(), SendBatch)
    for _ in range(4):
        send = only(driver.broken(send.replica, "left"), SendBatch)
        driver.draining(send.replica)
        send = only(driver.broken(send.replica, "exit"), SendBatch)
    assert not send.isolated
    assert send.attempt == 9
    assert answered(driver.done(send)) == [1]


def test_batch_is_retried_on_another_replica_when_the_stage_raises() -> None:
    driver = SchedulerHarness(replicas=2)
    send = only(driver.arrive(), SendBatch)
    again = only(driver.failed(send), SendBatch)
    assert (again.batch, again.kind, again.attempt) == (send.batch, "retry", 2)
    assert again.replica != send.replica
    assert answered(driver.done(again)) == [1]
    assert driver.scheduler.counters.retries == {0: 1}


def test_retry_waits_for_another_replica_when_only_the_failing_one_has_room() -> None:
    driver = SchedulerHarness(replicas=2, window=1, max_batch_size=1)
    first, second = sends(driver.arrive(3))
    taken = only(driver.failed(first), SendBatch)
    assert (taken.requests, taken.replica) == ((3,), first.replica), "other batches need not wait"
    assert only(driver.done(second), SendBatch).batch == first.batch


def test_requests_are_isolated_at_once_when_their_batch_could_not_be_sent() -> None:
    driver = SchedulerHarness(max_batch_size=2, batch_timeout_s=1.0)
    first = only(driver.arrive(2), SendBatch)
    assert first.requests == (1, 2)
    alone = only(driver.not_sent(first), SendBatch)
    assert (alone.requests, alone.isolated) == ((1,), True)
    follower = only(driver.done(alone), SendBatch)
    actions = driver.not_sent(follower)
    assert rejected(actions) == {2: "stage_error"}
    assert "could not be sent to stage 0: MemoryError" in only(actions, Reject).detail


def test_requests_are_isolated_when_the_stage_raises_and_the_other_replica_leaves() -> None:
    driver = SchedulerHarness(replicas=2, window=1, max_batch_size=1)
    first, second = sends(driver.arrive(2))
    driver.failed(first)
    actions = driver.draining(second.replica)
    assert of(actions, FreeBatch) == [FreeBatch(first.batch)]
    assert only(actions, SendBatch).isolated


def test_only_the_failing_request_is_refused_when_the_stage_raises_again() -> None:
    driver = SchedulerHarness(stages=2, max_batch_size=3, batch_timeout_s=1.0)
    pending = sends(driver.arrive(3))
    outcome = []
    while pending:
        send = pending.pop(0)
        actions = driver.failed(send, "boom") if send.stage == 1 and 2 in send.requests else driver.done(send)
        outcome += actions
        pending += sends(actions)
    assert sorted(answered(outcome)) == [1, 3]
    rejection = only(outcome, Reject)
    assert (rejection.request, rejection.reason) == (2, "stage_error")
    assert "boom" in rejection.detail
    assert driver.scheduler.open_requests == 0


@pytest.mark.parametrize(("requests", "sent"), [(1, 1), (3, 4)])
def test_input_that_the_model_does_not_take_is_computed_alone_at_most_once(requests: int, sent: int) -> None:
    driver = SchedulerHarness(max_batch_size=requests, batch_timeout_s=1.0)
    pending = sends(driver.arrive(requests))
    outcome, count = [], 0
    while pending:
        send, count = pending.pop(0), count + 1
        actions = driver.failed(send, "index 9", by_input=True) if 1 in send.requests else driver.done(send)
        outcome += actions
        pending += sends(actions)
    assert count == sent
    assert rejected(outcome) == {1: "invalid_input"}
    assert sorted(answered(outcome)) == list(range(2, requests + 1))


def test_requests_succeed_when_a_stage_is_empty_for_less_than_the_grace() -> None:
    driver = SchedulerHarness(stages=2, replicas=1, recovery_grace_s=5.0)
    send = only(driver.done(only(driver.arrive(), SendBatch)), SendBatch)
    driver.broken("s1r0")
    assert driver.arrive() == [], "accepted, and waits"
    assert driver.wait(4.9) == []
    again = sends(driver.ready("s1r1", 1))
    assert again[0].batch == send.batch
    assert sorted(answered(driver.answer_all(again))) == [1, 2]


def test_all_requests_are_refused_when_a_stage_is_empty_beyond_the_grace() -> None:
    driver = SchedulerHarness(stages=2, replicas=1, recovery_grace_s=5.0)
    driver.done(only(driver.arrive(), SendBatch))
    driver.broken("s1r0")
    driver.now_s += 1.0
    driver.arrive()
    assert driver.scheduler.next_wakeup_s() == 5.0
    assert rejected(driver.wait(4.0)) == {1: "no_replica", 2: "no_replica"}
    assert rejected(driver.arrive()) == {3: "no_replica"}
    driver.ready("s1r1", 1)
    assert answered(driver.answer_all(driver.arrive())) == [4]


@pytest.mark.parametrize("leaves", [True, False])
def test_grace_counts_from_when_the_last_replica_stopped_accepting(leaves: bool) -> None:
    driver = SchedulerHarness(replicas=1, recovery_grace_s=5.0, window=1)
    driver.arrive(2)
    if leaves:
        driver.draining("s0r0")
    else:
        driver.broken("s0r0", "left")
    assert driver.wait(4.9) == []
    assert 2 in rejected(driver.wait(0.2))


def raises_then_succeeds_elsewhere(driver: SchedulerHarness, link: str) -> list[object]:
    """One batch that is sent to `link` first, raises there, and succeeds on another. Returns the last actions."""
    send = next(send for send in sends(driver.arrive(2)) if send.replica == link)
    others = [other for other in driver.in_flight.values() if other is not send]
    again = [retry for retry in sends(driver.failed(send)) if retry.kind == "retry"]
    for other in others:
        again += [retry for retry in sends(driver.done(other)) if retry.kind == "retry"]
    return list(driver.done(again[0]))


def test_link_is_broken_when_batches_fail_there_repeatedly_and_succeed_elsewhere() -> None:
    driver = SchedulerHarness(max_batch_size=1)
    assert not of(raises_then_succeeds_elsewhere(driver, "s0r0"), FailReplica)  # type: ignore[arg-type]
    assert not of(raises_then_succeeds_elsewhere(driver, "s0r0"), FailReplica)  # type: ignore[arg-type]
    assert of(raises_then_succeeds_elsewhere(driver, "s0r0"), FailReplica) == [FailReplica("s0r0", "error")]  # type: ignore[arg-type]
    assert [send.replica for send in sends(driver.arrive(2))] == ["s0r1"] * 2


def test_links_are_kept_when_a_request_raises_on_every_replica() -> None:
    driver = SchedulerHarness(max_batch_size=1)
    for _ in range(6):
        actions = driver.arrive()
        for _ in range(3):
            following = sends(actions)
            actions = driver.failed(following[0]) if following else []
            assert not of(actions, FailReplica)
