"""The metrics of one process. Subclasses define theirs."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterable
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format."""


class ProgramMetrics:
    """The metrics of one process.

    Attributes:
        registry: of counters, gauges and histograms, which are thread-safe.
        derived: of collectors that read the state of the event loop in each scrape.
    """

    def __init__(self) -> None:
        # The `_created` series are unused and enlarge every scrape. prometheus_client has only a process-wide switch.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry, self.derived = CollectorRegistry(), CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        build = {
            "version": version("multiworld-serving"),
            "torch": version("torch"),
            "python": platform.python_version(),
        }
        Info("multiworld_build", "Versions that this process runs with.", registry=self.registry).info(build)

    def counter(self, name: str, says: str, labels: Iterable[str] = ()) -> Counter:
        """Define a counter, `multiworld_NAME_total`."""
        return Counter(f"multiworld_{name}", says, labels, registry=self.registry)

    def gauge(self, name: str, says: str, labels: Iterable[str] = ()) -> Gauge:
        """Define a gauge, `multiworld_NAME`."""
        return Gauge(f"multiworld_{name}", says, labels, registry=self.registry)

    def histogram(self, name: str, says: str, bounds: tuple[float, ...], labels: Iterable[str] = ()) -> Histogram:
        """Define a histogram, `multiworld_NAME`, with these bounds of its buckets."""
        return Histogram(f"multiworld_{name}", says, labels, buckets=bounds, registry=self.registry)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format. Call it on the event loop's thread."""
        return generate_latest(self.registry) + generate_latest(self.derived)

    async def scrape(self) -> bytes:
        """As `text`. Formats `registry` on a thread, because the series of 100 workers take about 40 ms."""
        derived = generate_latest(self.derived)
        return await asyncio.to_thread(generate_latest, self.registry) + derived
