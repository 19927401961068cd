"""Metrics of the data edges of one process."""

from __future__ import annotations

from multiworld import Transport
from multiworld_serving.common.metrics import ProgramMetrics

_FETCH_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class EdgeMetrics:
    """Defines the series of edges in the metrics of a program. Looking up labels would cost more than the increment. Thread-safe.

    Args:
        program: the metrics of the process.

    Attributes:
        bytes: of tensors, by direction and transport.
        fetches: of this process, by outcome.
        fetch_s: duration of successful fetches, by transport.
        open: edges, by direction.
    """

    def __init__(self, program: ProgramMetrics) -> None:
        sizes = program.counter(
            "edge_bytes", "Bytes of tensors that went over edges, by direction.", ("direction", "transport")
        )
        fetches = program.counter("edge_fetches", "Fetches of this process, by outcome.", ("outcome",))
        fetch_s = program.histogram(
            "edge_fetch_seconds",
            "Time of a successful fetch, with opening the edge if needed.",
            _FETCH_S,
            ("transport",),
        )
        self.shared_memory_missing = program.counter(
            "edge_shared_memory_missing",
            "Tensors that were copied through a socket because the system had no shared memory.",
        )
        edges_open = program.gauge("edges_open", "Edges that are open now, by direction.", ("direction",))
        self.retained_bytes = program.gauge("edge_retained_bytes", "Bytes of tensors kept for others to fetch.")
        self.budget_bytes = program.gauge("edge_budget_bytes", "Maximum bytes of tensors kept for others.")
        self.budget_exceeded = program.counter(
            "edge_budget_exceeded", "Tensors that were relayed because the memory for edges was used up."
        )
        labels, directions = {each: each.replace(" ", "_") for each in Transport}, ("sent", "received")
        self.bytes = {(way, each): sizes.labels(way, label) for way in directions for each, label in labels.items()}
        self.fetches = {outcome: fetches.labels(outcome) for outcome in ("fetched", "failed")}
        self.fetch_s = {transport: fetch_s.labels(label) for transport, label in labels.items()}
        self.open = {direction: edges_open.labels(direction) for direction in directions}
