"""Limits of requests and connections, derived from the settings."""

from __future__ import annotations

import logging
import math
import os
import resource
from dataclasses import dataclass
from typing import NamedTuple

from multiworld_serving.common.settings.serve import HttpSettings

logger = logging.getLogger(__name__)

_DECODE_THREADS = 4


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request and of all requests together."""

    timeout_s: float = 30.0
    """Seconds from a request's arrival to its response; a client can only shorten it."""
    max_body_bytes: int = 10 * 2**20
    max_held_bytes: int = 512 * 2**20
    """Bytes of all bodies in memory at once, from the first byte until the image is decoded."""
    max_image_pixels: int = 50_000_000
    """Width times height. A decoded image takes about ten bytes per pixel. Large images are decoded one at a time."""
    decode_threads: int = _DECODE_THREADS
    max_waiting_decodes: int = 256
    max_rows: int = 64
    """Maximum samples in one OIP request; lower if the inputs of this many exceed `max_body_bytes`."""
    finite_inputs: bool = False
    """Reject inputs that contain NaN or infinity."""
    top_k: int = 5
    """Number of classes in a response if the request does not say."""


def request_limits(settings: HttpSettings) -> RequestLimits:
    """The limits of one frontend. Limits of all requests together are divided by the number of frontends."""
    shares = settings.http_shares
    return RequestLimits(
        timeout_s=settings.timeout_s,
        max_body_bytes=settings.max_body_bytes,
        max_held_bytes=RequestLimits.max_held_bytes // shares,
        decode_threads=max(1, min(_DECODE_THREADS, len(os.sched_getaffinity(0)) // shares)),
        max_waiting_decodes=math.ceil(RequestLimits.max_waiting_decodes / shares),
        max_rows=min(RequestLimits.max_rows, settings.queue_limit),
        finite_inputs=settings.finite_inputs,
    )


class ConnectionLimits(NamedTuple):
    """Maximum numbers of connections of the ports of one frontend."""

    http: int
    admin: int
    grpc: int


def connection_limits(settings: HttpSettings) -> ConnectionLimits:
    """All connections use at most 5/8 of the file descriptors. The rest is for leaders, workers and files."""
    wanted = math.ceil(settings.max_connections / settings.http_shares)
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return ConnectionLimits(wanted, wanted, wanted)
    api = min(wanted, descriptors // (2 if settings.grpc_port is None else 4))
    if api < wanted:
        logger.warning(
            "max_connections=%d reduced to %d, because of the limit of %d file descriptors", wanted, api, descriptors
        )
    return ConnectionLimits(api, min(wanted, descriptors // 8), api)
