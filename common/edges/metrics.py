"""Metrics of the data edges of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from prometheus_client import Counter, Gauge, Histogram

from multiworld import Transport
from multiworld_serving.common.metrics import ProgramMetrics
from multiworld_serving.common.observers import observer

FetchOutcome = Literal["fetched", "gone", "unreachable"]
"""gone: the producer does not have the tensor any more; unreachable: no edge could be opened, or it broke."""
Direction = Literal["sent", "received"]
_FETCH_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


@observer
class EdgeMetrics:
    """Defines the series of edges in the metrics of a program. Thread-safe.

    Args:
        program: the metrics of the process.
    """

    def __init__(self, program: ProgramMetrics) -> None:
        counter = partial(Counter, registry=program.registry)
        gauge = partial(Gauge, registry=program.registry)
        sizes = counter(
            "multiworld_edge_bytes", "Bytes of tensors that went over edges, by direction.", ("direction", "transport")
        )
        fetches = counter("multiworld_edge_fetches", "Fetches of this process, by outcome.", ("outcome",))
        fetch_s = Histogram(
            "multiworld_edge_fetch_seconds",
            "Time of a successful fetch, with opening the edge if needed.",
            ("transport",),
            buckets=_FETCH_S,
            registry=program.registry,
        )
        self._no_memory = counter(
            "multiworld_edge_shared_memory_missing",
            "Tensors that were copied through a socket because the system had no shared memory.",
        )
        edges_open = gauge("multiworld_edges_open", "Edges that are open now, by direction.", ("direction",))
        self._retained = gauge("multiworld_edge_retained_bytes", "Bytes of tensors kept for others to fetch.")
        self._budget = gauge("multiworld_edge_budget_bytes", "Maximum bytes of tensors kept for others.")
        self._exceeded = counter(
            "multiworld_edge_budget_exceeded", "Tensors that were relayed because the memory for edges was used up."
        )
        labels = {transport: transport.replace(" ", "_") for transport in Transport}
        directions: tuple[Direction, ...] = get_args(Direction)
        self._bytes = {(way, each): sizes.labels(way, label) for way in directions for each, label in labels.items()}
        self._fetches = {outcome: fetches.labels(outcome) for outcome in get_args(FetchOutcome)}
        self._fetch_s = {transport: fetch_s.labels(label) for transport, label in labels.items()}
        self._open = {direction: edges_open.labels(direction) for direction in directions}

    def transferred(self, direction: Direction, transport: Transport, nbytes: int) -> None:
        """A tensor of this size was sent to a consumer, or received from a producer."""
        self._bytes[direction, transport].inc(nbytes)

    def fetched(self, seconds: float, transport: Transport) -> None:
        """A fetch succeeded."""
        self._fetches["fetched"].inc()
        self._fetch_s[transport].observe(seconds)

    def failed(self, outcome: FetchOutcome) -> None:
        """A fetch failed."""
        self._fetches[outcome].inc()

    def opened(self, direction: Direction, more: int) -> None:
        """Change the number of open edges: 1 or -1."""
        self._open[direction].inc(more)

    def store(self, budget_bytes: int, used_bytes: Callable[[], int]) -> None:
        """Set the budget for kept tensors. `used_bytes` is called in each scrape, on any thread."""
        self._budget.set(budget_bytes)
        self._retained.set_function(used_bytes)

    def shared_memory_missing(self) -> None:
        """The system had no shared memory for a tensor. Called on any thread."""
        self._no_memory.inc()

    def budget_exceeded(self) -> None:
        """A tensor was not kept because the budget is used up."""
        self._exceeded.inc()
