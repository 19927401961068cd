"""The statistics of `multiworld bench`."""

import pytest

from multiworld_serving.testing.load.clients import Load, Sample
from multiworld_serving.testing.load.measurement import measure

SAMPLES = [
    Sample(0.5, 0.1, 200),  # warm-up
    Sample(1.0, 0.1, 200),
    Sample(1.5, 0.3, 200),
    Sample(2.0, 0.2, 200),
    Sample(2.5, 0.01, 429, "full"),
    Sample(2.6, 0.5, 503, "no replica"),
    Sample(2.7, 0.1, 200, "wrong answer"),
    Sample(2.8, 9.0, 0, "ReadTimeout"),
    Sample(2.9, 0.4, 200),  # answered after the end
    Sample(3.5, 0.1, 200),  # sent after the end
]


def test_only_requests_of_the_measured_period_count_and_only_correct_answers_for_throughput_and_latency() -> None:
    found = measure(Load(SAMPLES), 1.0, 3.0, rows_per_request=8)
    assert [found[name] for name in ("requests", "answered", "refused", "failed")] == [8, 4, 1, 3]
    assert found["statuses"] == {"200": 5, "429": 1, "503": 1, "none": 1}
    assert found["errors"] == {"no replica": 1, "wrong answer": 1, "ReadTimeout": 1}
    assert found["answered_per_s"] == pytest.approx(1.5)
    assert found["rows_per_s"] == pytest.approx(12)
    latency = found["latency_ms"]
    assert list(latency) == ["p50", "p90", "p95", "p99", "p99.9", "max", "mean"]
    assert latency["p50"] == pytest.approx(200)
    assert latency["mean"] == pytest.approx(250)
    assert latency["max"] == latency["p99.9"] == pytest.approx(400)
