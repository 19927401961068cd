"""One record of the outcomes of requests: for Prometheus, the status page and the Open Inference Protocol."""

import time
from typing import Any

import pytest
import torch

from multiworld_serving.common.service.predictor import Prediction
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics
from multiworld_serving.server.frontend.observability.request_records import MAX_VERSIONS


class OfModel(FrontendMetrics):
    """Those of a frontend with one model."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = self.requests.of_model("m", slow_s=0.5)
        self.counts.declare("m", "v", ("v2",))


def predicted(images: int = 1, batch_size: int = 4, compute_s: float = 2.0) -> Prediction:
    return Prediction(torch.zeros(images, 3), "m", "v", 0.5, compute_s, 0.1, 1, (), batch_size)


def end(
    metrics: OfModel,
    prediction: Prediction | None = None,
    *,
    version: str = "v",
    code: int = 200,
    duration_s: float = 1.0,
    input_s: float = 0.0,
) -> None:
    """A request has begun and ended like this."""
    scope: dict[str, Any] = {"method": "POST", "path": "/v2", "headers": []}
    record = metrics.requests.begin(scope, version, "v2", metrics.counts)
    record.status, record.reason = code, "ok" if code == 200 else "deadline"
    record.prediction, record.input_s, record.output_s = prediction, input_s, 0.5
    record.started_s = time.monotonic() - duration_s
    metrics.requests.end(scope, record)


@pytest.fixture
def metrics() -> OfModel:
    return OfModel()


def test_outcomes_are_zero_before_the_first_request_of_a_version(metrics: OfModel) -> None:
    value = metrics.registry.get_sample_value
    labels = {"model": "m", "protocol": "v2", "code": "504", "reason": "deadline"}
    assert value("multiworld_requests_total", {**labels, "version": "v"}) == 0
    end(metrics, version="v1")
    assert value("multiworld_requests_total", {**labels, "version": "v1"}) == 0


def test_requests_in_flight_images_and_durations_are_counted(metrics: OfModel) -> None:
    value = metrics.registry.get_sample_value
    metrics.requests.begin({"method": "POST", "path": "/v2", "headers": []}, "v", "v2", metrics.counts)
    end(metrics, predicted(3), duration_s=0.22)
    end(metrics, predicted(2), duration_s=0.22)
    end(metrics, code=504)
    assert value("multiworld_requests_in_flight") == 1
    assert value("multiworld_images_total", {"model": "m", "version": "v"}) == 5
    assert value("multiworld_requests_slow_total", {"model": "m"}) == 0, "a request that failed is not a slow response"
    end(metrics, predicted(), duration_s=0.6)
    assert value("multiworld_requests_slow_total", {"model": "m"}) == 1
    bucket = {"model": "m", "protocol": "v2", "code": "200", "le": "0.25"}
    assert value("multiworld_request_duration_seconds_bucket", bucket) == 2
    assert value("multiworld_request_duration_seconds_bucket", {**bucket, "le": "0.2"}) == 0
    recent = [(status, round(duration_s, 1)) for status, duration_s in metrics.counts.take_recent()]
    assert recent[:2] == [(200, 0.2)] * 2
    assert metrics.counts.take_recent() == []


def test_series_of_dropped_versions_are_removed_and_their_counts_remain(metrics: OfModel) -> None:
    for number in range(MAX_VERSIONS + 2):
        end(metrics, predicted(), version=f"v{number}")
        end(metrics, version="v1", code=504)  # stays, because it is used
    lines = metrics.text().decode().splitlines()
    exported = {"v1", *(f"v{number}" for number in range(3, MAX_VERSIONS + 2))}
    for family in ("multiworld_requests_total", "multiworld_images_total"):
        found = {line.split('version="')[1].split('"')[0] for line in lines if line.startswith(family + "{")}
        assert found == exported, family
    assert [status for status, _ in metrics.counts.take_recent()] == [200, 504] * (MAX_VERSIONS + 2)
    assert metrics.counts.statistics("1")["inference_count"] == MAX_VERSIONS + 2


def test_statistics_count_a_batch_once_for_all_its_requests(metrics: OfModel) -> None:
    end(metrics, predicted())
    end(metrics, predicted(3))
    end(metrics, predicted(batch_size=1, compute_s=7.0), input_s=0.25)
    end(metrics, code=504)
    end(metrics, code=404)  # not for the model
    found = metrics.counts.statistics("1")
    assert (found["inference_count"], found["execution_count"]) == (5, 2)
    assert [(batch["batch_size"], batch["compute_infer"]) for batch in found["batch_stats"]] == [
        (1, {"count": 1, "ns": 7_000_000_000}),
        (4, {"count": 1, "ns": 2_000_000_000}),
    ]
    # Two answers of half a second each belong to the batch of four.
    assert [batch["compute_output"] for batch in found["batch_stats"]] == [
        {"count": 1, "ns": 500_000_000},
        {"count": 4, "ns": 1_000_000_000},
    ]
    phases = found["inference_stats"]
    assert [phases[each]["count"] for each in ("success", "fail")] == [3, 1]
    assert phases["success"]["ns"] == pytest.approx(3_000_000_000, rel=0.02)
    assert phases["compute_infer"] == {"count": 3, "ns": 11_000_000_000}
    assert phases["compute_input"]["ns"] == pytest.approx(550_000_000)
