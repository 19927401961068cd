"""Spans of inference requests. The client's `traceparent` is their parent; spans of the pipeline are their children."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

from multiworld_serving.common.observers import suppress_errors
from multiworld_serving.common.tracing import Tracing

if TYPE_CHECKING:
    from multiworld_serving.server.observability.requests import RequestRecord

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
    def begin(self, scope: Scope) -> Any:
        """The span of this request; None if it is not traced."""
        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        # The route as a name, so that the number of names is bounded.
        route = "/v2/models/{model}/infer" if scope["path"].startswith("/v2/") else scope["path"]
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span(f"{scope['method']} {route}", context=parent, kind=self._kind)
        current_span.set(
            span if span.is_recording() else None
        )  # a pipelined request inherits the value of the one before
        return current_span.get()

    @suppress_errors
    def end(self, scope: Scope, record: RequestRecord) -> None:
        """End the span. The record provides its attributes."""
        from opentelemetry.trace import Status, StatusCode

        if record.span is None:
            return
        attributes: dict[str, object] = {
            "http.request.method": scope["method"],
            "url.path": scope["path"][:256],
            "http.response.status_code": record.status,
            "multiworld.request_id": record.request_id,
            "multiworld.version": record.version,
            "multiworld.reason": record.reason,
        }
        if (found := record.prediction) is not None:
            attributes |= {
                "multiworld.images": len(found.output),
                "multiworld.attempts": found.attempts,
                "multiworld.path": ",".join(found.path),
            }
        record.span.set_attributes(attributes)
        if record.status >= 500:
            record.span.set_status(Status(StatusCode.ERROR, record.reason))
        record.span.end()


def current_span_ids() -> tuple[int, int] | None:
    """Trace id and span id of the current request, the parent of the leader's spans."""
    span = current_span.get()
    if span is None:
        return None
    context = span.get_span_context()
    return (context.trace_id, context.span_id)
