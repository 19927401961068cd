"""Inputs that stay at the replica that computed them, and inputs that are lost."""

from multiworld_serving.server.leader.scheduling.actions import FreeBatch, ReleaseReplica, SendBatch
from multiworld_serving.server.leader.scheduling.events import RequestCancelled
from tests.unit.scheduling.scheduler_harness import SchedulerHarness, answered, of, only, sends


def test_replica_is_free_and_not_blamed_when_it_could_not_get_the_inputs_of_requests_that_were_cancelled() -> None:
    driver = SchedulerHarness(max_batch_size=1, replicas=1, window=1)
    for _ in range(20):
        send = only(driver.arrive(), SendBatch)
        assert driver.handle(RequestCancelled(driver.requests)) == [FreeBatch(send.batch)]
        assert sends(driver.arrive()) == [], "the worker still has the batch"
        send = only(driver.not_sent(send), SendBatch)
        driver.done(send)


def test_requests_start_again_when_the_hedge_is_late_too_and_their_input_is_kept() -> None:
    driver = SchedulerHarness(stages=2, hedge_factor=2.0, hedge_floor_s=0.02, hedge_budget=1.0)
    for _ in range(60):  # 10 ms in each stage
        driver.answer_all(driver.arrive())
    first = only(driver.done(only(driver.arrive(), SendBatch), 0.01, kept=True), SendBatch)
    hedge = only(driver.wait(0.03), SendBatch)
    assert (hedge.kind, hedge.stage) == ("hedge", 1)
    again = only(driver.wait(0.02), SendBatch)
    assert (again.stage, again.kind, again.attempt, again.isolated) == (0, "first", 2, False)
    assert again.requests == first.requests
    assert driver.done(first) == driver.done(hedge) == []
    assert answered(driver.answer_all([again])) == [driver.requests]


def test_requests_start_again_when_the_replica_with_their_input_is_lost() -> None:
    driver = SchedulerHarness(stages=2)
    first = only(driver.arrive(), SendBatch)
    second = only(driver.done(first, kept=True), SendBatch)
    again = only(driver.broken(first.replica), SendBatch)
    assert (again.stage, again.requests, driver.done(second)) == (0, second.requests, [])


def test_draining_replica_does_not_wait_for_a_stage_without_replicas_which_its_worker_may_leave_to_serve() -> None:
    driver = SchedulerHarness(replicas=2, stages=2)
    first = only(driver.arrive(), SendBatch)
    second = only(driver.done(first, kept=True), SendBatch)
    driver.broken("s1r0")
    driver.broken("s1r1")
    actions = driver.draining(first.replica)
    assert of(actions, ReleaseReplica) == [ReleaseReplica(first.replica)]
    again = only(driver.ready("s1r2", 1), SendBatch)
    assert (again.stage, again.requests) == (0, second.requests)
    assert answered(driver.answer_all([again])) == [1]
