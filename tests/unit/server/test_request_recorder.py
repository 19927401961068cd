"""Series of requests: of the latest versions only."""

from __future__ import annotations

from multiworld_serving.server.observability.inference_statistics import ImageTimes, InferenceTimes, Statistics
from multiworld_serving.server.observability.metrics import Metrics
from multiworld_serving.server.observability.request_recorder import MAX_VERSIONS, LocalRequestRecorder, RequestOutcome

TIMES = InferenceTimes((ImageTimes(0.001, 0.002, 0.004, 2), ImageTimes(0.0, 0.001, 0.0, 2)), 0.008, 0.016)


def outcome(version: str, code: int = 200) -> RequestOutcome:
    return RequestOutcome(version, "v2", code, "ok" if code == 200 else "deadline", 0.5, TIMES if code == 200 else None)


def versions(metrics: Metrics, family: str) -> set[str]:
    lines = metrics.exposition()[0].decode().splitlines()
    return {line.split('version="')[1].split('"')[0] for line in lines if line.startswith(family + "{")}


def test_series_of_dropped_versions_are_removed() -> None:
    metrics = Metrics()
    metrics.declare_outcomes("m", "v0", ("v2",), {"ok": 200, "deadline": 504})
    recorder = LocalRequestRecorder("m", metrics, Statistics())
    for number in range(MAX_VERSIONS + 2):
        recorder.request_ended(0, outcome(f"v{number}"))
        recorder.request_ended(0, outcome("v1"))  # stays, because it is used
    kept = {"v1", *(f"v{number}" for number in range(3, MAX_VERSIONS + 2))}
    for family in ("multiworld_requests_total", "multiworld_images_total"):
        assert versions(metrics, family) == kept, family
    assert metrics.totals().answered == 2 * (MAX_VERSIONS + 2)


def test_new_version_has_series_with_value_0_before_its_first_failure() -> None:
    metrics = Metrics()
    metrics.declare_outcomes("m", "v0", ("v2",), {"ok": 200, "deadline": 504})
    LocalRequestRecorder("m", metrics, Statistics()).request_ended(0, outcome("v1"))
    labels = {"model": "m", "version": "v1", "protocol": "v2", "code": "504", "reason": "deadline"}
    assert metrics.registry.get_sample_value("multiworld_requests_total", labels) == 0
