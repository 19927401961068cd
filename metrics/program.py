"""What the metrics of every program have in common: its process, what it was built from, and how a scrape is answered."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

from metrics.families import Counter, Families, Gauge, Histogram, Info

FamilyT = TypeVar("FamilyT", Counter, Gauge, Histogram, Info)


class ProgramMetrics:
    """All series of one program. Thread-safe; calls cost about a microsecond. A subclass defines its own.

    Args:
        build: labels of `multiworld_build_info`, such as {"version": "0.1.0", "torch": "2.15.0"}.

    Attributes:
        registry: the same for whatever knows prometheus_client. Slow: a scrape asks `exposition`.
    """

    def __init__(self, build: dict[str, str] | None = None) -> None:
        # Nothing reads the `_created` series, and they swell every scrape. The library has one switch, for the process.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._families = Families()
        self._process = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)
        self.registry = CollectorRegistry()
        self.registry.register(self._families)
        build = build or {}
        info = self._add(Info("multiworld_build_info", "What this process was built from.", tuple(build)))
        info.labels(*build.values()).set(1)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The text for a scrape and its content type, as the scraper's `Accept` header wants them."""
        encode, content_type = choose_encoder(accept)
        ours = self._families.text(openmetrics=content_type.startswith("application/openmetrics-text"))
        return ours.encode() + encode(self._process), content_type

    def _counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        return self._add(Counter(f"multiworld_{name}_total", documentation, labels))

    def _gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        return self._add(Gauge(f"multiworld_{name}", documentation, labels))

    def _histogram(
        self, name: str, documentation: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        return self._add(Histogram(f"multiworld_{name}", documentation, buckets, labels))

    def _add(self, family: FamilyT) -> FamilyT:
        self._families.all.append(family)
        return family


def build_labels(torch: str) -> dict[str, str]:
    """What a process was built from.

    Args:
        torch: its version; who has imported torch knows.
    """
    return {"version": version("multiworld-serving"), "torch": torch, "python": platform.python_version()}
