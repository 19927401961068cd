"""Spans of inference requests. The client's `traceparent` is their parent; spans of the pipeline are their children."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from multiworld_serving.common.observers import suppress_errors
from multiworld_serving.common.tracing import Tracing
from multiworld_serving.server.observability.request_record import RequestRecord

current_span: ContextVar[Any | None] = ContextVar("current_span", default=None)
"""The recorded span of the request that the current task handles."""


def remote_span(trace_id: int, span_id: int) -> Any:
    """The span of another process, for `current_span`."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

    return NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)))


class RequestTraces:
    """Creates a span per traced request: requests of traced clients, and the configured share of the others."""

    def __init__(self, tracing: Tracing) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracing.tracer
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER

    @suppress_errors
    def begin(self, scope: Scope, record: RequestRecord) -> None:
        """Start the span of this request, if it is traced."""
        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        # The route as a name, so that the number of names is bounded.
        route = "/v2/models/{model}/infer" if scope["path"].startswith("/v2/") else scope["path"]
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span(f"{scope['method']} {route}", context=parent, kind=self._kind)
        record.span = span if span.is_recording() else None
        current_span.set(record.span)  # also None: the task of a pipelined request inherits the value of the one before

    @suppress_errors
    def end(self, scope: Scope, record: RequestRecord) -> None:
        """End the span. The record provides its attributes."""
        if record.span is not None:
            _describe(record.span, scope, record)
            record.span.end()


def _describe(span: Any, scope: Scope, record: RequestRecord) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attributes(
        {
            "http.request.method": scope["method"],
            "url.path": scope["path"][:256],
            "http.response.status_code": record.status,
            "multiworld.request_id": record.request_id,
            "multiworld.version": record.version,
            "multiworld.reason": record.reason,
        }
    )
    if record.inference is not None:
        span.set_attributes(
            {
                "multiworld.images": len(record.inference.predictions),
                "multiworld.attempts": record.attempts,
                "multiworld.path": ",".join(record.path),
            }
        )
    if record.status >= 500:
        span.set_status(Status(StatusCode.ERROR, record.reason))


def current_span_ids() -> tuple[int, int] | None:
    """Trace id and span id of the current request, the parent of the leader's spans."""
    span = current_span.get()
    if span is None:
        return None
    context = span.get_span_context()
    return (context.trace_id, context.span_id)
