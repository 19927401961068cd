"""OpenTelemetry traces, an optional extra (`otel`): what makes spans, and who must not need it otherwise."""

from tracing.provider import Tracing, start_tracing

__all__ = ["Tracing", "start_tracing"]
