"""Spans of inference requests. The client's `traceparent` is their parent; spans of the pipeline are their children."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

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

    @contextmanager
    def request(self, scope: Scope, record: RequestRecord) -> Iterator[None]:
        """Run the block in the span of this request; the record provides the attributes at its end."""
        parent = self._propagator.extract(_Carrier(scope))
        name = f"{scope['method']} {_route(scope['path'])}"
        span = self._tracer.start_span(name, context=parent, kind=self._kind)
        if not span.is_recording():
            yield
            return
        token = current_span.set(span)
        try:
            yield
        finally:
            current_span.reset(token)
            _describe(span, scope, record)
            span.end()


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
    if record.status >= 500 or not record.status:
        span.set_status(Status(StatusCode.ERROR, record.reason))


def _route(path: str) -> str:
    """The route as a span name, so that the number of names is bounded."""
    return "/v2/models/{model}/infer" if path.startswith("/v2/") else path


class _Carrier(dict[str, str]):
    """The W3C Trace Context headers, as the propagator expects them."""

    def __init__(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        super().__init__({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})


def current_span_ids() -> tuple[int, int] | None:
    """Trace id and span id of the current request, the parent of the leader's spans."""
    span = current_span.get()
    if span is None:
        return None
    context = span.get_span_context()
    return (context.trace_id, context.span_id)
