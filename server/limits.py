"""What one request, one connection, and all together may take, as the settings say it."""

from __future__ import annotations

import math
import os

from server.connections import ConnectionLimits
from server.frontend import FrontendLimits
from server.settings import ServeSettings

_DECODE_THREADS = 4


def frontend_limits(settings: ServeSettings) -> FrontendLimits:
    """For each of so many frontends as the settings want: what bounds all requests together is shared out among them."""
    shares = settings.frontends
    return FrontendLimits(
        timeout_s=settings.timeout_s,
        max_body_bytes=settings.max_body_bytes,
        max_held_bytes=FrontendLimits.max_held_bytes // shares,
        max_image_pixels=settings.max_image_pixels,
        exact_images=settings.decoding == "exact",
        decode_threads=max(1, min(_DECODE_THREADS, len(os.sched_getaffinity(0)) // shares)),
        max_waiting_decodes=math.ceil(FrontendLimits.max_waiting_decodes / shares),
        max_images=min(FrontendLimits.max_images, settings.queue_limit),
        top_k=min(settings.top_k, 1000),
    )


def connection_limits(settings: ServeSettings, *, shares: int = 1) -> ConnectionLimits:
    """For each of `shares` processes that serve one port."""
    return ConnectionLimits(
        max_connections=math.ceil(settings.max_connections / shares),
        idle_timeout_s=settings.idle_timeout_s,
        header_timeout_s=settings.header_timeout_s,
        stall_timeout_s=settings.stall_timeout_s,
        max_header_bytes=settings.max_header_bytes,
        max_headers=settings.max_headers,
    )
