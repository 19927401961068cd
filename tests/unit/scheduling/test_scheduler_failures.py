"""Links that break, hang or leave, stages that raise, and suspect samples that are computed one by one."""

import pytest

from multiworld_serving.server.leader.scheduling.actions import FailReplica, FreeBatch, Reject, SendBatch
from tests.unit.scheduling.scheduler_harness import SchedulerHarness, answered, of, only, rejected, sends


def test_batches_of_a_broken_link_keep_their_order() -> None:
    driver = SchedulerHarness(replicas=1, window=3, max_batch_size=1)
    driver.arrive(5)
    assert driver.broken("s0r0") == []
    driver.now_s += 0.25
    again = sends(driver.ready("s0r1"))
    assert [send.requests for send in again] == [(1,), (2,), (3,)]
    assert [(send.kind, send.attempt, send.waited_s) for send in again] == [("reroute", 2, 0.25)] * 3
    assert driver.scheduler.counters.reroutes == {0: 3}


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


@pytest.mark.parametrize(("requests", "sent"), [(1, 1), (3, 5), (32, 11)])
def test_input_that_the_model_does_not_take_is_found_by_halving(requests: int, sent: int) -> None:
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


@pytest.mark.parametrize("stages", [1, 2])
def test_rows_whose_stage_raises_are_found_by_halving(stages: int) -> None:
    driver = SchedulerHarness(stages=stages, max_batch_size=32, batch_timeout_s=1.0)
    pending, outcome, sizes, bad = sends(driver.arrive(32)), [], [], {7, 29}
    while pending:
        send = pending.pop(0)
        raises = send.stage == stages - 1 and bad & set(send.requests)
        sizes += [len(send.requests)] if raises else []
        actions = driver.failed(send) if raises else driver.done(send)
        outcome += actions
        pending += sends(actions)
    assert sorted(sizes, reverse=True) == [32, 32, 16, 16, 8, 8, 4, 4, 2, 2, 1, 1]
    assert rejected(outcome) == dict.fromkeys(bad, "stage_error")
    assert sorted(answered(outcome)) == sorted(set(range(1, 33)) - bad)


def test_rows_are_isolated_one_by_one_when_a_half_of_their_batch_breaks_links() -> None:
    driver = SchedulerHarness(replicas=4, max_batch_size=4, batch_timeout_s=1.0)
    retried = only(driver.failed(only(driver.arrive(4), SendBatch)), SendBatch)
    half = only(driver.failed(retried), SendBatch)
    assert (half.requests, half.isolated) == ((1, 2), True)
    again = only(driver.broken(half.replica), SendBatch)
    assert (again.requests, again.kind) == ((1, 2), "reroute")
    other = only(driver.broken(again.replica), SendBatch)
    assert [send.requests for send in (other, only(driver.done(other), SendBatch))] == [(3, 4), (1,)]


def test_link_is_broken_when_batches_fail_there_repeatedly_and_succeed_elsewhere() -> None:
    driver = SchedulerHarness(max_batch_size=1)
    broken = []
    for _ in range(3):
        there, elsewhere = sorted(sends(driver.arrive(2)), key=lambda send: send.replica)
        again = only(driver.failed(there) + driver.done(elsewhere), SendBatch)
        broken.append(of(driver.done(again), FailReplica))
    assert broken == [[], [], [FailReplica("s0r0", "error")]]
    assert [send.replica for send in sends(driver.arrive(2))] == ["s0r1"] * 2


def test_links_are_kept_when_a_request_raises_on_every_replica() -> None:
    driver = SchedulerHarness(max_batch_size=1)
    for _ in range(6):
        actions = driver.arrive()
        for _ in range(3):
            following = sends(actions)
            actions = driver.failed(following[0]) if following else []
            assert not of(actions, FailReplica)


# -- isolation: only the poison is refused -------------------------------------------------------------------------------------


def test_isolation_alternates_with_ordinary_batches_on_a_single_replica() -> None:
    driver = SchedulerHarness(replicas=1, max_batch_size=3, window=1, max_attempts=2, batch_timeout_s=1.0)
    driver.arrive(3)
    driver.broken("s0r0")
    pending = sends(driver.ready("s0r1"))
    driver.arrive(9)
    turns = [send.isolated for send in pending]
    while pending:
        pending = sends(driver.done(pending.pop()))
        turns += [send.isolated for send in pending]
    assert turns == [True, False, True, False, True, False]


def test_replica_that_computes_several_batches_at_once_hangs_if_it_returns_only_the_later_ones() -> None:
    driver = SchedulerHarness(replicas=1, max_batch_size=1, hang_timeout_s=2.0)
    first, second = sends(driver.arrive(2))
    for _ in range(3):
        driver.arrive()
        [second] = sends(driver.done(second, after_s=0.5))
    assert not of(driver.done(second, after_s=0.4), FailReplica)
    assert of(driver.wait(0.2), FailReplica) == [FailReplica(first.replica, "hang")]


def test_hang_timeout_begins_again_when_the_first_batch_returns() -> None:
    driver = SchedulerHarness(replicas=1, max_batch_size=1, hang_timeout_s=2.0)
    first, _ = sends(driver.arrive(2))
    driver.done(first, after_s=1.5)
    assert not of(driver.wait(1.9), FailReplica)
    assert of(driver.wait(0.2), FailReplica)
