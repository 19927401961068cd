"""The exposition of our metric families equals prometheus_client's."""

from __future__ import annotations

from collections.abc import Callable

import prometheus_client as reference
import pytest
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from multiworld_serving.common.metrics.families import Counter, Families, Gauge, Histogram, Info

NASTY = 'a "quoted" \\ path\nand a line'


def write_reference(encode: Callable[[Collector], bytes]) -> str:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    counter = reference.Counter("jobs_total", "Jobs \\ done.", ("kind",), registry=registry)
    counter.labels("a").inc()
    counter.labels(NASTY).inc(2.5)
    reference.Gauge("depth", "How deep.", registry=registry).set(-3.25)
    histogram = reference.Histogram("wait_seconds", "Waits.", ("stage",), buckets=(0.5, 1, 2), registry=registry)
    for value in (0.5, 0.75, 5):
        histogram.labels(0).observe(value)
    reference.Info("build", "Built from.", registry=registry).info({"version": "1"})
    return encode(registry).decode().removesuffix("# EOF\n")


def our_families() -> Families:
    families = Families()
    counter = Counter("jobs_total", "Jobs \\ done.", ("kind",))
    counter.labels("a").inc()
    counter.labels(NASTY).inc(2.5)
    gauge = Gauge("depth", "How deep.")
    gauge.labels().set(-3.25)
    histogram = Histogram("wait_seconds", "Waits.", (0.5, 1, 2), ("stage",))
    for value in (0.5, 0.75, 5):
        histogram.labels(0).observe(value)
    info = Info("build_info", "Built from.", ("version",))
    info.labels("1").set(1)
    families.all += [counter, gauge, histogram, info]
    return families


def same_numbers(text: str) -> list[str]:
    """`1` and `1.0` are the same number."""
    lines = []
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        lines.append(line if line.startswith("#") else f"{head} {float(value)}")
    return lines


@pytest.mark.parametrize(("openmetrics", "encode"), [(False, generate_latest), (True, generate_openmetrics)])
def test_text_equals_that_of_prometheus_client(openmetrics: bool, encode: Callable[[Collector], bytes]) -> None:
    assert same_numbers(our_families().text(openmetrics=openmetrics)) == same_numbers(write_reference(encode))


def test_families_can_be_read_through_a_registry() -> None:
    registry = CollectorRegistry()
    registry.register(our_families())
    assert registry.get_sample_value("jobs_total", {"kind": NASTY}) == 2.5
    assert registry.get_sample_value("wait_seconds_bucket", {"stage": "0", "le": "1.0"}) == 2


def test_series_with_too_few_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="pass one for each"):
        Counter("jobs_total", "Jobs.", ("kind", "place")).labels("a")


def test_label_given_as_number_and_as_text_is_one_series() -> None:
    counter = Counter("jobs_total", "Jobs.", ("stage",))
    counter.labels(0).inc()
    counter.labels("0").inc()
    assert counter.text(openmetrics=False, exemplars=False).splitlines()[2:] == ['jobs_total{stage="0"} 2']
