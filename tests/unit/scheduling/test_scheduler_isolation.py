"""Isolation: suspect samples are computed one by one, so that only the poison is refused."""

from multiworld_serving.server.scheduling.actions import FreeBatch, SendBatch
from tests.unit.scheduling.scheduler_harness import SchedulerHarness, answered, of, only, sends


def test_batch_is_split_when_it_has_broken_all_but_one_of_its_worlds() -> None:
    driver = SchedulerHarness(replicas=4, max_batch_size=3, batch_timeout_s=1.0, max_attempts=3)
    first = only(driver.arrive(3), SendBatch)
    second = only(driver.broken(first.replica), SendBatch)
    actions = driver.broken(second.replica)
    assert of(actions, FreeBatch) == [FreeBatch(first.batch)]
    alone = only(actions, SendBatch)
    assert (alone.requests, alone.isolated, alone.stage, alone.kind, alone.attempt) == ((1,), True, 0, "first", 3)


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


def test_innocent_suspect_is_rerouted_when_it_has_not_broken_enough_worlds() -> None:
    """Isolated because the stage raised twice; a world that breaks afterwards is its first."""
    driver = SchedulerHarness(replicas=3)
    first = only(driver.arrive(), SendBatch)
    retry = only(driver.failed(first), SendBatch)
    alone = only(driver.failed(retry), SendBatch)
    again = only(driver.broken(alone.replica), SendBatch)
    assert (again.isolated, again.kind) == (True, "reroute")
    assert answered(driver.done(again)) == [1]
