"""The number of replicas that a load needs: arrival rates, times by batch size, and several leaders."""

from types import SimpleNamespace
from typing import cast

import pytest

from multiworld_serving.common.service.capacity_report import CapacityReport
from multiworld_serving.server.leader.scheduling.actions import Reject
from multiworld_serving.server.leader.scheduling.batches import Attempt
from multiworld_serving.server.leader.scheduling.estimates.capacity import DRAIN_S, UTILISATION
from multiworld_serving.server.leader.scheduling.estimates.service_times import ServiceTimes
from multiworld_serving.server.leader.scheduling.events import BatchDone, RequestArrived
from tests.unit.scheduling.scheduler_harness import SchedulerHarness, only, sends


def times_of(*measured: tuple[int, int, float]) -> ServiceTimes:
    """Ten samples of each (stage, rows, compute_s)."""
    times = ServiceTimes()
    for stage, rows, compute_s in measured:
        attempt = SimpleNamespace(
            replica=SimpleNamespace(pool=SimpleNamespace(stage=stage)), batch=SimpleNamespace(rows=(None,) * rows)
        )
        for _ in range(10):
            times.observe(cast(Attempt, attempt), compute_s, compute_s, 0.0)
    return times


def test_time_of_an_unknown_size_is_an_upper_bound() -> None:
    times = times_of((0, 1, 0.010), (0, 8, 0.020))
    assert times.compute_s(0, 1) == pytest.approx(0.010)
    assert times.compute_s(0, 8) == pytest.approx(0.020)
    assert times.compute_s(0, 4) == pytest.approx(0.040), "four times a batch of one"
    assert times_of((0, 8, 0.020)).compute_s(0, 1) == pytest.approx(0.020), "as long as the larger batch"
    assert times.compute_s(1, 1) is None


def test_scheduler_measures_load_and_times() -> None:
    driver = SchedulerHarness(stages=2, replicas=1, max_batch_size=1)
    assert driver.scheduler.replicas_wanted(0.0) == (0.0, 0.0)
    for number in range(200):
        actions = driver.handle(RequestArrived(number, 1e9))
        for stage_s in (0.010, 0.020):
            (send,) = sends(actions)
            actions = driver.handle(BatchDone(send.batch, send.replica, stage_s, 0.0), stage_s)
        driver.now_s += 0.02
    wanted = driver.scheduler.replicas_wanted(driver.now_s)
    assert wanted == pytest.approx((20 * 0.010 / UTILISATION, 20 * 0.020 / UTILISATION), rel=0.05)


def test_requests_that_are_rejected_because_of_overload_are_load() -> None:
    driver = SchedulerHarness(replicas=1, max_batch_size=1, queue_limit=1, window=1)
    driver.arrive(2)
    for _ in range(100):
        only(driver.arrive(), Reject)
    assert driver.scheduler.arrivals.per_s(driver.now_s + 1.0) == pytest.approx(102)


def test_a_backlog_is_what_exceeds_one_batch_for_each_replica() -> None:
    driver = SchedulerHarness(replicas=2, max_batch_size=4, batch_timeout_s=100.0)
    for _ in range(20):
        driver.answer_all(driver.arrive(4), 0.1)
    driver.arrive(16 + 8)  # four batches in flight
    assert driver.scheduler.queue_depth == 8
    (usual,) = driver.scheduler.replicas_wanted(driver.now_s)
    driver.arrive(10)
    assert driver.scheduler.replicas_wanted(driver.now_s) == pytest.approx(
        (usual + 10 / DRAIN_S * 0.025 / UTILISATION,)
    )


def test_report_survives_its_text_and_a_cut_text_is_none() -> None:
    report = CapacityReport((0.5, 2.25), (("local-0",), ("local-1", "local-2")))
    text = report.to_json()
    assert CapacityReport.from_json(text) == report
    assert CapacityReport.from_json(text[:-4]) is None
    assert CapacityReport.from_json('{"wanted":[1],"serving":[]}') is None
