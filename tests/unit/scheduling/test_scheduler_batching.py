"""Policies of batches: when they are formed, where they are sent, and their version. Invariants under faults: tests/simulation."""

import pytest

from multiworld_serving.server.leader.scheduling.actions import Action, KeepOutput, SendBatch
from multiworld_serving.server.leader.scheduling.estimates.service_times import ServiceTimes
from multiworld_serving.server.leader.scheduling.events import BatchDone
from tests.unit.scheduling.scheduler_harness import SchedulerHarness, answered, only, sends


def test_batch_is_sent_when_its_oldest_request_has_waited_long_enough() -> None:
    driver = SchedulerHarness(batch_timeout_s=0.01)
    assert driver.arrive() == []
    driver.now_s += 0.005
    assert driver.arrive() == []
    assert driver.scheduler.next_wakeup_s() == 0.01
    send = only(driver.wait(0.005), SendBatch)
    assert send.requests == (1, 2)
    assert send.waited_s == 0.01


def test_requests_wait_while_all_replicas_are_busy_with_adaptive_batching() -> None:
    driver = SchedulerHarness(replicas=2, batch_timeout_s=1.0, max_batch_size=3, adaptive_batching=True)
    first, second = only(driver.arrive(), SendBatch), only(driver.arrive(), SendBatch)
    assert {first.replica, second.replica} == {"s0r0", "s0r1"}
    assert driver.arrive(2) == []
    assert driver.scheduler.next_wakeup_s() == 1.0
    assert only(driver.arrive(), SendBatch).requests == (3, 4, 5)  # full
    assert driver.arrive(2) == []
    alone = next(send for send in (first, second) if driver.scheduler.in_flight(send.replica) == 1)
    assert only(driver.done(alone), SendBatch).requests == (6, 7)  # that replica has no other work


def test_batches_grow_while_they_are_fast_and_shrink_when_they_are_slow() -> None:
    driver = SchedulerHarness(replicas=1, window=1, max_batch_size=32, slow_batch_size=8)

    def sizes(row_s: float) -> list[int]:
        """Of batches while requests wait, if each row takes this time."""
        found = []
        for _ in range(100):
            driver.arrive(40 - driver.scheduler.queue_depth)
            (sent,) = driver.in_flight.values()
            found.append(len(sent.requests))
            driver.handle(BatchDone(sent.batch, sent.replica, computed_s=row_s * len(sent.requests), transfer_s=0.0))
        return found

    assert sizes(0.001)[1:9] == [8] * 8, "the time is not known yet"
    assert sizes(0.001)[-1] == 32
    assert sizes(0.004)[-1] == 12, "12 rows take 48 ms"
    assert sizes(0.010)[-1] == 8


def test_batch_is_sent_when_the_replica_is_nearly_free_with_adaptive_batching() -> None:
    driver = SchedulerHarness(replicas=1, batch_timeout_s=0.002, max_batch_size=8, adaptive_batching=True)

    def done(send: SendBatch) -> list[Action]:
        """Computed for 0.1 s, with 0.03 s in transit."""
        return driver.handle(BatchDone(send.batch, send.replica, computed_s=0.1, transfer_s=0.03), after_s=0.13)

    for _ in range(8):
        done(only(driver.arrive(), SendBatch))
    sent_s, first = driver.now_s, only(driver.arrive(), SendBatch)
    assert driver.arrive() == []
    assert driver.scheduler.next_wakeup_s() == pytest.approx(sent_s + 0.098)
    second = only(driver.wait(0.098), SendBatch)  # arrives when the first has been computed
    assert driver.arrive() == []
    driver.handle(BatchDone(first.batch, first.replica, computed_s=0.1, transfer_s=0.03), after_s=0.032)
    assert driver.scheduler.next_wakeup_s() == pytest.approx(sent_s + 0.13 + 0.1 - 0.03 - 0.002)
    assert only(driver.wait(0.068), SendBatch).requests == (11,)
    assert second.requests == (10,)


def test_batch_goes_to_the_replica_with_the_fewest_outstanding_samples() -> None:
    driver = SchedulerHarness(replicas=1, window=4, max_batch_size=2, batch_timeout_s=1.0)
    driver.arrive(2)  # two samples on s0r0
    driver.ready("s0r1")
    assert only(driver.arrive(2), SendBatch).replica == "s0r1"
    driver.ready("s0r2")
    assert only(driver.arrive(2), SendBatch).replica == "s0r2"


def test_replicas_take_turns_when_equally_loaded() -> None:
    driver = SchedulerHarness(replicas=3)
    links = []
    for _ in range(6):
        send = only(driver.arrive(), SendBatch)
        links.append(send.replica)
        driver.done(send)
    assert links == ["s0r0", "s0r1", "s0r2"] * 2


def test_no_batch_is_formed_when_a_later_stage_is_saturated() -> None:
    driver = SchedulerHarness(stages=2, replicas=1, window=1, max_batch_size=1)
    first = only(driver.arrive(9), SendBatch)
    second = sends(driver.done(first))  # stage 1 takes it, stage 0 the next
    assert [(send.stage, send.requests) for send in second] == [(1, (1,)), (0, (2,))]
    third = driver.done(second[1])  # it waits for stage 1: no further batch is formed
    assert third == [KeepOutput(second[1].batch, "s0r0", 1)]
    after = sends(driver.done(second[0]))
    assert [(send.stage, send.requests) for send in after] == [(1, (2,)), (0, (3,))]


def test_rare_key_goes_next_when_its_oldest_request_has_waited_long_enough() -> None:
    driver = SchedulerHarness(replicas=1, window=1, batch_timeout_s=0.5, max_batch_size=2)
    driver.arrive(2, key="8")
    (busy,) = driver.in_flight.values()
    driver.arrive(key="rare")
    driver.arrive(6, key="8")  # full batches, always
    driver.wait(0.5)
    rare = only(driver.done(busy), SendBatch)
    assert rare.requests == (3,)
    assert only(driver.done(rare), SendBatch).requests == (4, 5)


def test_batch_restarts_with_another_version_when_its_own_lost_the_stage() -> None:
    driver = SchedulerHarness(stages=2, replicas=1, max_batch_size=2, batch_timeout_s=1.0)
    old = only(driver.arrive(2), SendBatch)
    driver.ready("n0", 0, "v2")
    driver.ready("n1", 1, "v2")
    driver.draining("s1r0")
    new = only(driver.done(old), SendBatch)
    assert (new.replica, new.requests, new.stage, new.attempt) == ("n0", (1, 2), 0, 2)
    assert answered(driver.answer_all([new])) == [1, 2]


def test_version_is_in_use_until_its_last_batch_has_ended() -> None:
    driver = SchedulerHarness(stages=2, replicas=1)
    batches_of = driver.scheduler.batches_of
    old = only(driver.arrive(), SendBatch)
    driver.ready("n0", 0, "v2")
    driver.ready("n1", 1, "v2")
    assert (batches_of("v1"), batches_of("v2")) == (1, 0)
    new = only(driver.arrive(), SendBatch)
    assert (batches_of("v1"), batches_of("v2")) == (1, 1)
    driver.answer_all([new])
    driver.answer_all([old])
    assert (batches_of("v1"), batches_of("v2"), batches_of("v3")) == (0, 0, 0)


def test_batch_that_returns_does_not_cost_more_with_more_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SchedulerHarness(stages=64, replicas=1, max_batch_size=32, slow_batch_size=8)
    asked, compute_s = list[int](), ServiceTimes.compute_s

    def counted(times: ServiceTimes, stage: int, rows: int) -> float | None:
        asked.append(stage)
        return compute_s(times, stage, rows)

    monkeypatch.setattr(ServiceTimes, "compute_s", counted)
    for _ in range(20):
        driver.answer_all(driver.arrive(), after_s=0.01)
    asked.clear()
    driver.answer_all(driver.arrive(), after_s=0.01)
    assert asked == list(range(64))
