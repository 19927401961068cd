"""The metrics of one process, and how those of several processes are merged."""

from __future__ import annotations

import asyncio
import platform
import re
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
_HAS_MODEL = re.compile(r'(^|,)model="')
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (.+)")


class ProgramMetrics:
    """The metrics of one process. Subclasses define theirs.

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


def merge_metrics(texts: Iterable[tuple[str, str, str]]) -> str:
    """Merge expositions in Prometheus' text format.

    Args:
        texts: name of a process, the model that it serves if it serves one, and its metrics. An empty name or model adds no label.
    """
    families: dict[str, list[str]] = {}
    for process, model, text in texts:
        family = ""
        own, of_model = (text and _label(name, text) for name, text in (("process", process), ("model", model)))
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                families.setdefault(family, [line])
            elif line.startswith("# TYPE "):
                if len(families.setdefault(family, [])) == 1:
                    families[family].append(line)
            elif line and not line.startswith("#") and (match := _SAMPLE.fullmatch(line)) is not None:
                name, labels, value = match.groups()
                has_model = labels and _HAS_MODEL.search(labels)
                found = ",".join(filter(None, (own, "" if has_model else of_model, labels)))
                families.setdefault(family, []).append(f"{name}{{{found}}} {value}")
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def _label(name: str, value: str) -> str:
    escaped = value.replace("\\", r"\\").replace('"', r"\"")
    return f'{name}="{escaped}"'
