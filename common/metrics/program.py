"""Base of each program's metrics: process metrics, build info, and the exposition of a scrape."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import choose_encoder

from multiworld_serving.common.metrics.families import Counter, Families, Gauge, Histogram, Info

_VERSION = re.compile(r";\s*version\s*=([^;]*)", re.IGNORECASE)
_OPENMETRICS = "application/openmetrics-text"
_KNOWN_VERSIONS = {"0.0.1", "0.0.4", "1.0.0"}
"""Versions of OpenMetrics and of the text format."""

FamilyT = TypeVar("FamilyT", Counter, Gauge, Histogram, Info)


class ProgramMetrics:
    """All metrics of one program. Thread-safe; calls cost about a microsecond. Subclasses declare their families.

    Args:
        build: labels of `multiworld_build_info`, such as {"version": "0.1.0", "torch": "2.15.0"}.

    Attributes:
        registry: a prometheus_client view of the same families. Slow; scrapes use `exposition`.
    """

    def __init__(self, build: dict[str, str] | None = None) -> None:
        # The `_created` series are unused and enlarge every scrape. prometheus_client has only a process-wide switch.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._families = Families()
        self._process = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)
        self.registry = CollectorRegistry()
        self.registry.register(self._families)
        build = build or {}
        info = self._add(Info("multiworld_build_info", "Versions that this process runs with.", tuple(build)))
        info.labels(*build.values()).set(1)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Body and content type of a scrape, negotiated from the `Accept` header."""
        encode, content_type = choose_encoder(_known_formats(accept))
        openmetrics = content_type.startswith(_OPENMETRICS)
        ours = self._families.text(openmetrics=openmetrics, exemplars=openmetrics)
        return ours.encode() + encode(self._process), content_type

    def part(self) -> str:
        """These metrics for `merge_metrics`: Prometheus' text format with the exemplars of OpenMetrics."""
        return self._families.text(exemplars=True) + generate_latest(self._process).decode()

    def counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        """Declare a counter, `multiworld_NAME_total`."""
        return self._add(Counter(f"multiworld_{name}_total", documentation, labels))

    def gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        """Declare a gauge, `multiworld_NAME`."""
        return self._add(Gauge(f"multiworld_{name}", documentation, labels))

    def histogram(
        self, name: str, documentation: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        """Declare a histogram, `multiworld_NAME`, with these upper bounds."""
        return self._add(Histogram(f"multiworld_{name}", documentation, buckets, labels))

    def _add(self, family: FamilyT) -> FamilyT:
        self._families.all.append(family)
        return family


def accepts_openmetrics(accept: str) -> bool:
    """Whether an `Accept` header prefers OpenMetrics to Prometheus' text format."""
    return choose_encoder(_known_formats(accept))[1].startswith(_OPENMETRICS)


def _known_formats(accept: str) -> str:
    """Drop entries with unsupported versions from an `Accept` header, because prometheus_client accepts any version."""
    return ",".join(entry for entry in accept.split(",") if set(_VERSION.findall(entry)) <= _KNOWN_VERSIONS)


def build_labels(torch: str) -> dict[str, str]:
    """Labels of `multiworld_build_info`. `torch` is its version, passed in so that this module need not import it."""
    return {"version": version("multiworld-serving"), "torch": torch, "python": platform.python_version()}
