"""Several versions of the model at once: a batch stays with the version that it started with."""

from multiworld_serving.server.scheduling.actions import FreeBatch, SendBatch
from tests.unit.scheduling.scheduler_harness import SchedulerHarness, answered, of, only


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
