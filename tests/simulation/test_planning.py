"""Forecasts agree with theory where a closed formula exists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from multiworld_serving.testing.planning.fleet_history import simulate_history
from multiworld_serving.testing.planning.forecast import Plan, compute_forecast
from multiworld_serving.testing.planning.meter import quantile
from multiworld_serving.testing.plots import draw_forecasts

SINGLE = Plan(
    stages=1, replicas=1, load=0.5, mtbf_s=float("inf"), max_batch_size=1, batch_timeout_s=0.0, queue_limit=10_000
)


@pytest.mark.parametrize("load", [0.2, 0.5, 0.7])
def test_waiting_time_equals_that_of_an_m_d_1_queue_within_5_percent(load: float) -> None:
    plan = replace(SINGLE, load=load, requests=30_000)
    forecast = compute_forecast(plan)
    assert forecast.mean_s is not None
    waiting_s = forecast.mean_s - plan.service_s
    assert waiting_s == pytest.approx(load * plan.service_s / (2 * (1 - load)), rel=0.05)


def test_latency_equals_the_slowest_path_at_low_load() -> None:
    forecast = compute_forecast(replace(SINGLE, stages=3, load=0.001, requests=2_000))
    assert forecast.p50_s == pytest.approx(3 * SINGLE.service_s, rel=1e-6)


@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (2, 2), (3, 2), (1, 3)])
def test_availability_equals_that_of_independent_replicas_within_20_percent(stages: int, replicas: int) -> None:
    plan = Plan(stages=stages, replicas=replicas, load=0.5, mtbf_s=100.0, recovery_s=10.0)
    history = simulate_history(
        stages=stages,
        replicas=replicas,
        mtbf_s=plan.mtbf_s,
        recovery_s=plan.recovery_s,
        settle_s=1.0,
        max_failures=100_000,
        random=Random(3),
    )
    assert history.outages.count >= 100
    assert 1 - history.availability == pytest.approx(1 - plan.exact_availability, rel=0.2)


def test_refusals_equal_the_stage_downtime_within_10_percent_without_recovery_grace() -> None:
    plan = replace(SINGLE, load=0.1, mtbf_s=1_000.0, recovery_s=10.0, grace_s=0.0, detection_s=0.0)
    forecast = compute_forecast(plan)
    assert forecast.refused.keys() == {"no_replica"}
    assert forecast.failed == pytest.approx(1 - plan.exact_availability, rel=0.1)


def test_no_request_fails_when_requests_may_wait_for_the_only_replica() -> None:
    forecast = compute_forecast(replace(SINGLE, load=0.1, mtbf_s=1_000.0, recovery_s=5.0, requests=5_000))
    assert forecast.outages
    assert forecast.failed == pytest.approx(0.0, abs=1e-12)
    assert forecast.p99_s is not None
    assert 0.025 < forecast.p99_s < 5.1


def test_load_above_the_capacity_is_refused_early() -> None:
    forecast = compute_forecast(replace(SINGLE, load=2.0, queue_limit=32, requests=10_000))
    assert forecast.refused["overloaded"] == pytest.approx(0.5, rel=0.05)


def test_forecast_is_reproducible_and_improves_with_replicas() -> None:
    plan = Plan(
        stages=2, replicas=1, load=0.5, mtbf_s=600.0, recovery_s=5.0, service_s=0.1, grace_s=1.0, requests=2_000
    )
    assert compute_forecast(plan) == compute_forecast(plan)
    assert compute_forecast(replace(plan, replicas=2)).failed < compute_forecast(plan).failed / 10


@pytest.mark.parametrize(
    "wrong", [{"stages": 0}, {"load": 0.0}, {"load": float("inf")}, {"detection_s": 20.0}, {"tail": "long"}]
)
def test_plan_with_a_number_out_of_range_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Plan(**{"stages": 1, "replicas": 1, "load": 0.5, **wrong})  # type: ignore[arg-type]


def test_forecast_that_would_take_hours_is_refused() -> None:
    with pytest.raises(ValueError, match="reduce the load or the recovery time"):
        compute_forecast(Plan(stages=1, replicas=2, load=0.5, service_s=1e-4, mtbf_s=1e6, recovery_s=1e4))


def test_quantile_is_weighted() -> None:
    assert quantile([(1.0, 1.0), (2.0, 98.0), (3.0, 1.0)], 0.5) == 2.0
    assert quantile([(5.0, 1.0), (1.0, 99.0)], 0.99) == 1.0
    assert quantile([(5.0, 2.0), (1.0, 98.0)], 0.99) == 5.0
    assert quantile([], 0.5) is None


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_is_written(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib", reason="an extra: bench")
    forecasts = [compute_forecast(replace(SINGLE, load=load, requests=500)) for load in (0.2, 0.5)]
    draw_forecasts(forecasts, tmp_path / f"plan.{ending}")
    assert (tmp_path / f"plan.{ending}").stat().st_size > 1000
