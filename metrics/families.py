"""Counters, gauges and histograms that are cheap to scrape: the text before each value is made once, when its series is born.

prometheus_client builds every line of every scrape anew, which takes 38 ms for the series of 100 workers, and takes the
interpreter from the event loop for as long. Here a scrape joins prepared text with numbers. What is kept of that library is
what it does well: the process's own metrics, and the choice of the format.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Literal, TypeVar

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Kind = Literal["counter", "gauge", "histogram", "info"]

_lock = threading.Lock()
"""Held for each change and for each series' text. One for all: who changes holds it for less than a microsecond."""


class Series(ABC):
    """One time series, or one histogram: everything that has the same labels."""

    __slots__ = ()

    @abstractmethod
    def text(self) -> str:
        """Its lines for a scrape."""


class NumberSeries(Series):
    """A number that rises or is set."""

    __slots__ = ("_head", "_value")

    def __init__(self, name: str, labels: str) -> None:
        self._head = f"{name}{{{labels}}} " if labels else f"{name} "
        self._value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Raise it. A counter must not be lowered."""
        with _lock:
            self._value += amount

    def dec(self) -> None:
        """Lower it by one."""
        self.inc(-1)

    def set(self, value: float) -> None:
        """Make it this."""
        self._value = value

    @property
    def value(self) -> float:
        """What it is now."""
        return self._value

    def text(self) -> str:
        return f"{self._head}{_number(self._value)}\n"


class HistogramSeries(Series):
    """How many observations were at most so large, for each of some edges; and their sum."""

    __slots__ = ("_counts", "_edges", "_heads", "_sum", "_tail")

    def __init__(self, name: str, labels: str, edges: Sequence[float]) -> None:
        others = f",{labels}" if labels else ""
        self._edges = tuple(edges)
        self._heads = [f'{name}_bucket{{le="{_number(edge)}"{others}}} ' for edge in (*map(float, edges), math.inf)]
        braces = f"{{{labels}}}" if labels else ""
        self._tail = (f"{name}_count{braces} ", f"{name}_sum{braces} ")
        self._counts = [0] * len(self._heads)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        with _lock:
            self._counts[bisect_left(self._edges, value)] += 1
            self._sum += value

    def text(self) -> str:
        with _lock:
            counts, total = self._counts.copy(), self._sum
        lines, below = [], 0
        for head, count in zip(self._heads, counts, strict=True):
            below += count
            lines.append(f"{head}{below}\n")
        count_head, sum_head = self._tail
        lines.append(f"{count_head}{below}\n{sum_head}{_number(total)}\n")
        return "".join(lines)


SeriesT = TypeVar("SeriesT", bound=Series)


class Family(ABC, Generic[SeriesT]):
    """All series of one name.

    Args:
        name: as Prometheus stores it; a counter's ends in `_total`.
    """

    kind: Kind

    def __init__(self, name: str, documentation: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.label_names = tuple(labels)
        self._documentation = _escaped(documentation)
        self._series: dict[tuple[str, ...], SeriesT] = {}
        self._by_given: dict[tuple[object, ...], SeriesT] = {}
        """The same by what callers give, which may be numbers: to turn those into text would cost more than the rest."""

    def labels(self, *values: object) -> SeriesT:
        """The series with these values for the labels, in their order; it is there from now on."""
        series = self._by_given.get(values)
        if series is None:
            series = self._by_given.setdefault(values, self._named(tuple(map(str, values))))
        return series

    def clear(self) -> None:
        """Forget all series: what they told is not known any more."""
        with _lock:
            self._series.clear()
            self._by_given.clear()

    def items(self) -> Iterator[tuple[tuple[str, ...], SeriesT]]:
        """All series by their labels' values."""
        return iter(tuple(self._series.items()))  # a copy, because a series may be born meanwhile

    def text(self, *, openmetrics: bool) -> str:
        """The family for a scrape. OpenMetrics names a family without its unit of counting."""
        name = self.name
        if openmetrics:
            name = name.removesuffix("_total" if self.kind == "counter" else "_info")
        kind = "gauge" if self.kind == "info" and not openmetrics else self.kind
        head = f"# HELP {name} {self._documentation}\n# TYPE {name} {kind}\n"
        return head + "".join([series.text() for _, series in self.items()])

    def _named(self, values: tuple[str, ...]) -> SeriesT:
        if len(values) != len(self.label_names):
            raise ValueError(f"{self.name} has the labels {self.label_names}, not so many as {values}")
        with _lock:
            if (series := self._series.get(values)) is None:
                pairs = zip(self.label_names, values, strict=True)
                text = ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in pairs)
                series = self._series[values] = self._new_series(text)
        return series

    @abstractmethod
    def _new_series(self, labels: str) -> SeriesT: ...


class NumberFamily(Family[NumberSeries]):
    """Numbers."""

    def _new_series(self, labels: str) -> NumberSeries:
        return NumberSeries(self.name, labels)


class Counter(NumberFamily):
    """Numbers that only rise."""

    kind = "counter"


class Gauge(NumberFamily):
    """Numbers that rise and fall."""

    kind = "gauge"


class Info(NumberFamily):
    """What something is, as labels of a series that is always 1."""

    kind = "info"


class Histogram(Family[HistogramSeries]):
    """Distributions over fixed edges."""

    kind = "histogram"

    def __init__(self, name: str, documentation: str, edges: Sequence[float], labels: Sequence[str] = ()) -> None:
        super().__init__(name, documentation, labels)
        self.edges = tuple(edges)

    def _new_series(self, labels: str) -> HistogramSeries:
        return HistogramSeries(self.name, labels, self.edges)


class Families(Collector):
    """All families of one program. As a `Collector` it can be asked by whatever knows prometheus_client, slowly."""

    def __init__(self) -> None:
        self.all: list[NumberFamily | Histogram] = []

    def text(self, *, openmetrics: bool = False) -> str:
        """Everything for a scrape, without the end mark of OpenMetrics."""
        return "".join([family.text(openmetrics=openmetrics) for family in self.all])

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        return text_string_to_metric_families(self.text())


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text
