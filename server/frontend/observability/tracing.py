"""Traces with OpenTelemetry, which is optional (extra `otel`).

Frontends create the spans of requests: the client's `traceparent` is their parent. Leaders reply with the times of the batches of a
traced request, so that leaders and workers export nothing. A background thread exports the spans over OTLP/HTTP. The exporter reads other
options (headers, certificates, compression) from the OTEL_EXPORTER_OTLP_… environment variables.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.observers import suppress_errors
from multiworld_serving.common.service.predictor import StageAttempt, Trace
from multiworld_serving.common.settings.serve import HttpSettings

_EXPORT_TIMEOUT_S = 5
_STAGE_ATTRIBUTES = ("stage_name", "worker", "replica", "kind", "compute_s", "transfer_s")
_LAST_SPANS_MS = 2000
"""Deadline for exporting the last spans at exit, in case the collector does not respond."""


@contextlib.contextmanager
def exporting_traces(settings: HttpSettings) -> Iterator[Any]:
    """Export spans while the block runs. Yields OpenTelemetry's tracer; None if there is no endpoint.

    Raises:
        UserError: OpenTelemetry is not installed.
    """
    if settings.otlp_endpoint is None:
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise UserError(
            f"traces (--otlp-endpoint) need OpenTelemetry: pip install 'multiworld-serving[otel]' ({error})"
        ) from error
    facts = {
        "service.name": "multiworld-frontend",
        "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
        "service.version": importlib.metadata.version("multiworld-serving"),
    }
    sampler = ParentBased(TraceIdRatioBased(settings.trace_ratio))
    provider = TracerProvider(sampler=sampler, resource=Resource.create(facts), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield provider.get_tracer("multiworld")
    finally:
        provider.force_flush(_LAST_SPANS_MS)
        # Not provider.shutdown(), which waits for an export in progress with all its retries.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


class RequestTraces:
    """Creates a span per traced request: requests of traced clients, and the configured share of the others."""

    def __init__(self, tracer: Any) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER

    @suppress_errors
    def begin(self, scope: Scope) -> Any:
        """The span of this request; None if it is not traced."""
        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        # The route as a name, so that the number of names is bounded.
        route = scope["path"]
        for prefix, name in (("/v2/", "/v2/models/{model}/infer"), ("/predict/", "/predict/{model}")):
            route = name if route.startswith(prefix) else route
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span(f"{scope['method']} {route}", context=parent, kind=self._kind)
        return span if span.is_recording() else None

    def add_trace(self, span: Any, trace: Trace, passed_s: float) -> None:
        """Add the spans of the queue, the batches and their stages below that of a request.

        Args:
            passed_s: difference of `time.monotonic()` between this process and the leader.
        """
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        now_s = time.monotonic() - passed_s
        to_unix_ns = time.time_ns() - round(now_s * 1e9)

        def add(parent: Any, name: str, begun_s: float, ended_s: float, error: str = "", **attributes: object) -> Any:
            context, named = (
                set_span_in_context(parent),
                {f"multiworld.{key}": each for key, each in attributes.items()},
            )
            begun_ns, ended_ns = (round(each * 1e9) + to_unix_ns for each in (begun_s, ended_s))
            made = self._tracer.start_span(name, context, attributes=named, start_time=begun_ns)
            if error:
                made.set_status(Status(StatusCode.ERROR, error))
            made.end(ended_ns)
            return made

        batches: dict[int, list[StageAttempt]] = {}
        for each in trace.attempts:
            batches.setdefault(each.batch, []).append(each)
        if batches:
            add(span, "queue", trace.arrived_s, trace.attempts[0].sent_s)
        for number, sent in batches.items():
            ended_s = max(each.ended_s or now_s for each in sent)
            batch = add(span, "batch", sent[0].sent_s, ended_s, batch=number, rows=sent[0].rows)
            for each in sent:
                facts = {name: getattr(each, name) for name in _STAGE_ATTRIBUTES}
                add(batch, f"stage {each.stage}", each.sent_s, each.ended_s or now_s, each.error, **facts)

    def end(self, span: Any, attributes: dict[str, object], failed: str) -> None:
        """End a span. `failed` is the reason of a failure of the service, or empty."""
        from opentelemetry.trace import Status, StatusCode

        span.set_attributes(attributes)
        if failed:
            span.set_status(Status(StatusCode.ERROR, failed))
        span.end()
