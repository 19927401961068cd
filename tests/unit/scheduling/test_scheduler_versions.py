"""Several versions of the model at once: a batch stays with the version that it started with."""

from __future__ import annotations

from multiworld_serving.server.scheduling.actions import FreeBatch, SendBatch
from tests.unit.scheduling.scheduler_harness import SchedulerHarness, answered, of, only


def test_new_batches_use_the_newest_complete_version() -> None:
    driver = SchedulerHarness(stages=2, replicas=1)
    driver.ready("n0", 0, "v2")
    assert driver.scheduler.current_version == "v1"
    assert only(driver.arrive(), SendBatch).version == "v1"
    driver.ready("n1", 1, "v2")
    assert driver.scheduler.current_version == "v2"
    assert only(driver.arrive(), SendBatch).version == "v2"


def test_batch_keeps_its_version_when_a_newer_one_becomes_current() -> None:
    driver = SchedulerHarness(stages=2, replicas=1)
    old = only(driver.arrive(), SendBatch)
    driver.ready("n0", 0, "v2")
    driver.ready("n1", 1, "v2")
    assert only(driver.done(old), SendBatch).replica == "s1r0"


def test_older_version_serves_again_when_the_newer_one_loses_a_stage() -> None:
    driver = SchedulerHarness(stages=2, replicas=1)
    driver.ready("n0", 0, "v2")
    driver.ready("n1", 1, "v2")
    driver.broken("n1")
    assert only(driver.arrive(), SendBatch).replica == "s0r0"


def test_batch_restarts_with_another_version_when_its_own_lost_the_stage() -> None:
    driver = SchedulerHarness(stages=2, replicas=1, max_batch_size=2, batch_timeout_s=1.0)
    old = only(driver.arrive(2), SendBatch)
    driver.ready("n0", 0, "v2")
    driver.ready("n1", 1, "v2")
    driver.draining("s1r0")
    actions = driver.done(old)
    assert of(actions, FreeBatch) == [FreeBatch(old.batch)]
    new = only(actions, SendBatch)
    assert (new.replica, new.requests, new.stage, new.attempt) == ("n0", (1, 2), 0, 2)
    assert answered(driver.answer_all([new])) == [1, 2]


def test_waiting_batches_restart_when_a_new_version_is_complete_and_their_stage_is_empty() -> None:
    driver = SchedulerHarness(stages=2, replicas=1)
    driver.done(only(driver.arrive(), SendBatch))
    driver.broken("s1r0")
    driver.ready("n0", 0, "v2")
    new = only(driver.ready("n1", 1, "v2"), SendBatch)
    assert (new.replica, new.requests) == ("n0", (1,))


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
