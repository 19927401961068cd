"""Where spans go: OpenTelemetry's own SDK, sending batches of them by OTLP over HTTP from a thread of its own.

What is not said in our settings (headers, certificates, compression) the exporter takes from OpenTelemetry's own variables,
OTEL_EXPORTER_OTLP_….
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from config import UserError

_EXPORT_TIMEOUT_S = 5
_LAST_SPANS_MS = 2000
"""So long may the last spans take at the end of the process: a collector that does not answer holds nobody up."""


@dataclass(frozen=True)
class Tracing:
    """A process that traces.

    Attributes:
        tracer: OpenTelemetry's.
        processors: what spans are given to when they have ended.
    """

    tracer: Any
    provider: Any

    def close(self) -> None:
        """Send what there is, for a short time. Blocks."""
        self.provider.force_flush(_LAST_SPANS_MS)
        # Its own shutdown would wait for an export under way, however long its retries take.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def start_tracing(endpoint: str | None, *, service: str, instance: str, ratio: float = 1.0) -> Tracing | None:
    """Begin to trace; None when no endpoint is given.

    Args:
        endpoint: URL that spans are sent to by OTLP over HTTP, with its path: "http://127.0.0.1:4318/v1/traces".
        service: this program, among others.
        instance: this process, among others of the program.
        ratio: share of the requests that come without a trace of their own that begin one.
    Raises:
        UserError: OpenTelemetry is not installed.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UserError(
            f"traces (--otlp-endpoint) need OpenTelemetry: pip install 'multiworld-serving[otel]' ({error})"
        ) from error
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    return tracing_to(BatchSpanProcessor(exporter), service=service, instance=instance, ratio=ratio)


def tracing_to(processor: Any, *, service: str, instance: str, ratio: float = 1.0) -> Tracing:
    """Trace into this span processor."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    version = importlib.metadata.version("multiworld-serving")
    facts = {"service.name": service, "service.instance.id": instance, "service.version": version}
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(ratio)), resource=Resource.create(facts), shutdown_on_exit=False
    )
    provider.add_span_processor(processor)
    return Tracing(provider.get_tracer("multiworld"), provider)


@contextlib.contextmanager
def closing(tracing: Tracing | None) -> Iterator[None]:
    """Send the last spans when the block ends."""
    try:
        yield
    finally:
        if tracing is not None:
            tracing.close()
