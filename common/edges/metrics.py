"""Metrics of the data edges of one process."""

from __future__ import annotations

from typing import Literal, get_args

from multiworld import Transport
from multiworld_serving.common.metrics import ProgramMetrics
from multiworld_serving.common.wire import EdgeTransport

FetchOutcome = Literal["fetched", "gone", "unreachable"]
"""gone: the producer does not have the tensor any more; unreachable: no edge could be opened, or it broke."""
_OUTCOMES: tuple[FetchOutcome, ...] = get_args(FetchOutcome)
Direction = Literal["sent", "received"]

_FETCH_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class EdgeMetrics:
    """Defines the series of edges in the metrics of a program. Thread-safe.

    Args:
        program: the metrics of the process.
    """

    def __init__(self, program: ProgramMetrics) -> None:
        self._bytes = program.counter(
            "edge_bytes", "Bytes of tensors that went over edges, by direction.", ("direction", "transport")
        )
        self._fetches = program.counter("edge_fetches", "Fetches of this process, by outcome.", ("outcome",))
        self._fetch_s = program.histogram(
            "edge_fetch_seconds",
            "Time of a successful fetch, with opening the edge if needed.",
            _FETCH_S,
            ("transport",),
        )
        self._no_memory = program.counter(
            "edge_shared_memory_missing",
            "Tensors that were copied through a socket because the system had no shared memory.",
        ).labels()
        self._open = program.gauge("edges_open", "Edges that are open now, by direction.", ("direction",))
        self._retained = program.gauge("edge_retained_bytes", "Bytes of tensors kept for others to fetch.").labels()
        self._budget = program.gauge("edge_budget_bytes", "Most bytes of tensors kept: --edge-memory.").labels()
        self._exceeded = program.counter(
            "edge_budget_exceeded", "Tensors that were relayed because the memory for edges was used up."
        ).labels()
        for direction in ("sent", "received"):
            self._open.labels(direction)
            for transport in Transport:
                self._bytes.labels(direction, transport_label(transport))
        for transport in Transport:
            self._fetch_s.labels(transport_label(transport))
        for outcome in _OUTCOMES:
            self._fetches.labels(outcome)

    def transferred(self, direction: Direction, transport: Transport, nbytes: int) -> None:
        """A tensor of this size was sent to a consumer, or received from a producer."""
        self._bytes.labels(direction, transport_label(transport)).inc(nbytes)

    def fetched(self, seconds: float, transport: Transport) -> None:
        """A fetch succeeded."""
        self._fetches.labels("fetched").inc()
        self._fetch_s.labels(transport_label(transport)).observe(seconds)

    def failed(self, outcome: FetchOutcome) -> None:
        """A fetch failed."""
        self._fetches.labels(outcome).inc()

    def opened(self, direction: Direction, more: int) -> None:
        """Change the number of open edges: 1 or -1."""
        self._open.labels(direction).inc(more)

    def retained(self, nbytes: int) -> None:
        """Set the bytes that are kept."""
        self._retained.set(nbytes)

    def budget(self, nbytes: int) -> None:
        """Set the budget."""
        self._budget.set(nbytes)

    def shared_memory_missing(self) -> None:
        """The system had no shared memory for a tensor. Called on any thread."""
        self._no_memory.inc()

    def budget_exceeded(self) -> None:
        """A tensor was not kept because the budget is used up."""
        self._exceeded.inc()


def transport_label(transport: Transport) -> EdgeTransport:
    """The value of the label `transport`, and of the status."""
    return "shared_memory" if transport is Transport.SHARED_MEMORY else "tcp"
