"""Exports spans with the OpenTelemetry SDK, which is optional (extra `otel`): batches over OTLP/HTTP, from a background thread.

The exporter reads other options (headers, certificates, compression) from the OTEL_EXPORTER_OTLP_… environment variables.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from multiworld_serving.common.config import UserError

_EXPORT_TIMEOUT_S = 5
_LAST_SPANS_MS = 2000
"""Deadline for exporting the last spans at exit, in case the collector does not respond."""


@dataclass(frozen=True)
class Tracing:
    """OpenTelemetry's tracer and tracer provider of this process."""

    tracer: Any
    provider: Any

    def close(self) -> None:
        """Export the remaining spans. Blocks for up to 2 s."""
        self.provider.force_flush(_LAST_SPANS_MS)
        # Not provider.shutdown(), which waits for an export in progress with all its retries.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def start_tracing(endpoint: str | None, *, service: str, instance: str, ratio: float = 1.0) -> Tracing | None:
    """Start tracing; None if there is no endpoint.

    Args:
        endpoint: OTLP/HTTP URL with its path, such as "http://127.0.0.1:4318/v1/traces".
        service: the program (`service.name`).
        instance: the process (`service.instance.id`).
        ratio: share of requests without a trace context that start a trace.
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
    """Start tracing into this span processor."""
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
def close_on_exit(tracing: Tracing | None) -> Iterator[None]:
    """Close `tracing`, if any, when the block ends."""
    try:
        yield
    finally:
        if tracing is not None:
            tracing.close()
