"""Hedging: late batches are sent twice; the first result wins."""

from typing import Any

import pytest

from multiworld_serving.server.leader.scheduling.actions import SendBatch
from tests.unit.scheduling.scheduler_harness import SchedulerHarness, only


def _warm(**config: Any) -> SchedulerHarness:
    """Batches of one sample usually take 0.1 s; the hedge budget holds one or two samples."""
    driver = SchedulerHarness(**{"hedge_factor": 2.0, "hedge_floor_s": 0.05, "max_batch_size": 1, **config})
    for _ in range(40):
        driver.answer_all(driver.arrive() + driver.wait(driver.scheduler.config.batch_timeout_s), after_s=0.1)
    return driver


def test_batch_is_hedged_when_it_takes_longer_than_usual() -> None:
    driver = _warm()
    first = only(driver.arrive(), SendBatch)
    assert driver.wait(0.19) == []
    hedge = only(driver.wait(0.02), SendBatch)
    assert (hedge.batch, hedge.kind, hedge.attempt) == (first.batch, "hedge", 1)
    assert hedge.replica != first.replica
    assert hedge.waited_s == pytest.approx(0.2)
    driver.done(hedge)
    assert driver.scheduler.counters.hedges == {"won": 1}


def test_batch_of_a_new_size_is_late_by_the_times_of_smaller_ones() -> None:
    driver = _warm(max_batch_size=4, batch_timeout_s=1.0)
    first = only(driver.arrive(4), SendBatch)
    assert driver.wait(0.79) == []
    assert only(driver.wait(0.02), SendBatch).batch == first.batch
    driver.done(first)
    assert driver.scheduler.counters.hedges == {"lost": 1}


def test_nothing_is_hedged_when_no_other_replica_has_room() -> None:
    driver = _warm(replicas=1)
    driver.arrive()
    assert driver.wait(1.0) == []
    assert only(driver.ready("s0r1"), SendBatch).kind == "hedge"


def test_batches_that_wait_for_those_of_other_leaders_are_not_late_once_that_is_usual() -> None:
    driver = _warm()
    for _ in range(8):
        driver.answer_all(driver.arrive(), after_s=0.3)
    driver.arrive()
    assert driver.wait(0.59) == []
    assert only(driver.wait(0.02), SendBatch).kind == "hedge"


def test_hedges_of_lost_replicas_cost_no_budget() -> None:
    driver = _warm(hedge_budget=0.0)
    for generation in range(10):
        first = only(driver.arrive(), SendBatch)
        driver.done(only(driver.wait(0.25), SendBatch))
        driver.broken(first.replica, "hang")
        driver.ready(f"s0r{generation + 2}")


def test_other_copy_counts_as_the_retry_when_a_hedged_batch_fails() -> None:
    driver = _warm(replicas=3)
    first = only(driver.arrive(), SendBatch)
    hedge = only(driver.wait(0.25), SendBatch)
    assert driver.failed(first) == []
    assert only(driver.failed(hedge), SendBatch).isolated
