"""OpenTelemetry spans of a worker: one "compute" span per traced request of a batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from multiworld_serving.common.observers import observer
from multiworld_serving.common.tracing import Tracing
from multiworld_serving.common.wire.tracing import TraceContext


@observer
class ComputeTraces:
    """Creates the spans.

    Args:
        worker, device: attributes of every span.
    """

    def __init__(self, tracing: Tracing, worker: str, device: str) -> None:
        from opentelemetry import trace

        self._tracer = tracing.tracer
        self._trace = trace
        self._facts = {"multiworld.worker": worker, "multiworld.device": device}

    def computed(
        self, parents: Sequence[TraceContext], *, stage: int, images: int, compute_ns: int, waited_us: int
    ) -> None:
        """Record that a batch has just been computed. `parents` are the leader's spans of its traced requests."""
        ended_ns = time.time_ns()
        facts = self._facts | {
            "multiworld.stage": stage,
            "multiworld.images": images,
            "multiworld.waited_s": waited_us / 1e6,
        }
        for parent in parents:
            span = self._tracer.start_span(
                "compute",
                context=self._trace.set_span_in_context(self._remote(parent)),
                kind=self._trace.SpanKind.SERVER,
                start_time=ended_ns - compute_ns,
                attributes=facts,
            )
            span.end(ended_ns)

    def _remote(self, parent: TraceContext) -> Any:
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        context = self._trace.SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
        return self._trace.NonRecordingSpan(context)
