"""Set-up of OpenTelemetry, which is optional (extra `otel`)."""

from multiworld_serving.common.tracing.provider import Tracing, start_tracing

__all__ = ["Tracing", "start_tracing"]
