"""Admission: which requests are refused, and the reasons."""

import pytest

from multiworld_serving.server.leader.scheduling.actions import Reject, SendBatch
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from multiworld_serving.server.leader.scheduling.events import Drain, ReplicaReady, RequestArrived, RequestCancelled
from multiworld_serving.server.leader.scheduling.scheduler import Scheduler
from tests.unit.scheduling.scheduler_harness import SchedulerHarness, answered, only, rejected, sends


def test_request_is_refused_as_not_ready_when_the_pipeline_was_never_complete() -> None:
    driver = SchedulerHarness(stages=2, replicas=0)
    driver.ready("s0r0", 0)
    assert not driver.scheduler.ready
    assert rejected(driver.arrive()) == {1: "not_ready"}
    driver.ready("s1r0", 1)
    assert driver.scheduler.ready
    assert len(sends(driver.arrive())) == 1


def test_request_is_refused_as_overloaded_when_the_queue_is_full() -> None:
    driver = SchedulerHarness(replicas=1, window=1, queue_limit=3)
    assert rejected(driver.arrive(5)) == {5: "overloaded"}
    driver.handle(RequestCancelled(4))
    assert rejected(driver.arrive(2)) == {7: "overloaded"}


def test_samples_of_one_request_are_accepted_or_refused_together_and_fill_batches_at_once() -> None:
    driver = SchedulerHarness(replicas=2, window=1, max_batch_size=4, queue_limit=10, adaptive_batching=True)
    assert rejected(driver.handle(RequestArrived(1, 100.0, rows=11))) == {1: "overloaded"}
    assert driver.scheduler.open_requests == 0
    actions = driver.handle(RequestArrived(20, 100.0, rows=9))
    assert [send.requests for send in sends(actions)] == [(20, 21, 22, 23), (24, 25, 26, 27)]
    assert driver.scheduler.queue_depth == 1
    with pytest.raises(ValueError, match="request 20 is still open"):
        driver.handle(RequestArrived(18, 100.0, rows=3))
    with pytest.raises(ValueError, match="stage 7 of 1"):
        driver.ready("x", 7)


def test_retry_after_is_a_second_while_the_time_of_a_full_batch_is_not_known() -> None:
    driver = SchedulerHarness(replicas=1, window=1, max_batch_size=8, queue_limit=10)
    for _ in range(20):
        driver.done(only(driver.arrive(), SendBatch), after_s=0.2)  # eight together may take no longer
    assert only(driver.arrive(12), Reject).retry_after_s == 1.0


def test_retry_after_follows_the_number_of_replicas_of_the_slowest_stage() -> None:
    driver = SchedulerHarness(stages=2, replicas=2, window=1, max_batch_size=1, queue_limit=10)
    for _ in range(20):
        slow = only(driver.done(only(driver.arrive(), SendBatch), after_s=0.01), SendBatch)
        driver.done(slow, after_s=0.4)
    assert only(driver.arrive(13), Reject).retry_after_s == pytest.approx(10 * 0.4 / 2)
    driver.broken("s1r0")
    assert only(driver.arrive(1), Reject).retry_after_s == pytest.approx(10 * 0.4)


def test_requests_do_not_wait_for_a_full_batch_while_draining() -> None:
    driver = SchedulerHarness(batch_timeout_s=1.0)
    driver.arrive()
    waited = only(driver.handle(Drain()), SendBatch)
    begun = only(driver.arrive(), SendBatch)
    assert (waited.requests, begun.requests) == ((1,), (2,))
    assert [answered(driver.done(send)) for send in (waited, begun)] == [[1], [2]]


def test_time_does_not_run_backwards() -> None:
    scheduler = Scheduler(SchedulerConfig(num_stages=1, batch_timeout_s=0.0))
    scheduler.handle(ReplicaReady("a", 0, "v1"), now_s=5.0)
    (send,) = scheduler.handle(RequestArrived(1, deadline_s=9.0), now_s=4.0)
    assert isinstance(send, SendBatch)
    assert send.waited_s == 0.0


def test_request_is_refused_at_once_when_the_queue_outlasts_its_deadline() -> None:
    driver = SchedulerHarness(replicas=1, window=1, max_batch_size=4)
    driver.handle(RequestArrived(100_000, 1e6))
    driver.answer_all([next(iter(driver.in_flight.values()))])
    send = only(driver.arrive(12), SendBatch)
    for _ in range(50):  # full batches, each answered after 0.1 s; 8 samples are left waiting
        send = only(driver.done(send, after_s=0.1), SendBatch)
        driver.arrive(4)
    before_it = driver.scheduler.open_requests
    needed_s = before_it / 40
    assert rejected(driver.arrive(timeout_s=needed_s * 2.0)) == {}
    rejection = only(driver.arrive(timeout_s=needed_s * 0.5), Reject)
    assert rejection.reason == "overloaded"
    assert rejection.retry_after_s == pytest.approx(needed_s, rel=0.3)
