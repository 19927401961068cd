"""The span of each request, from the client's `traceparent`, and the way from it to those of the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from server.request_record import RequestRecord
from tracing import Tracing

current_span: ContextVar[Any | None] = ContextVar("current_span", default=None)
"""The recorded span of the request that this task works for."""


def remote_span(trace_id: int, span_id: int) -> Any:
    """A recorded span of another process, for `current_span`."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

    return NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)))


class RequestTraces:
    """Makes a span for each request that is traced: those of traced clients, and of the others the share that is set."""

    def __init__(self, tracing: Tracing) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracing.tracer
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER

    @contextmanager
    def request(self, scope: Scope, record: RequestRecord) -> Iterator[None]:
        """The block is the request's span; the record tells at its end how it went."""
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
    answers = record.inference.answers if record.inference is not None else ()
    if answers:
        span.set_attributes(
            {
                "multiworld.images": len(answers),
                "multiworld.attempts": max(answer.attempts for answer in answers),
                "multiworld.path": ",".join(answers[0].path),
            }
        )
    if record.status >= 500 or not record.status:
        span.set_status(Status(StatusCode.ERROR, record.reason))


def _route(path: str) -> str:
    """Few names, whatever clients ask for."""
    return path if path == "/predict" else "/v2/models/{model}/infer"


class _Carrier(dict[str, str]):
    """The two headers of W3C's Trace Context, as the propagator looks for them."""

    def __init__(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        super().__init__({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
