"""Serves `GET /metrics`, `/healthz` and `/readyz` of a worker or leader. A worker also runs if the port is taken."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.http.listener import bind
from multiworld_serving.common.http.server import HttpServer, serving
from multiworld_serving.common.metrics import CONTENT_TYPE

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS = 16
_KEEP_ALIVE_S = 5
_CLOSE_S = 1


@contextlib.asynccontextmanager
async def metrics_port(
    host: str,
    port: int,
    scrape: Callable[[], Awaitable[bytes]],
    ready: Callable[[], bool] = lambda: False,
    *,
    required: bool = False,
) -> AsyncIterator[int | None]:
    """Serve the metrics while the block runs. Yields the port; None if it cannot be bound.

    Args:
        port: 0 takes any free one.
        scrape: returns the metrics in Prometheus' text format.
        ready: returns whether the process serves now; called for each `GET /readyz`.
        required: whether to raise if the port cannot be bound.
    Raises:
        UserError: the port cannot be bound, and it is required.
    """
    try:
        sock = bind(host, port, "--metrics-port", "--metrics-host")
    except UserError as error:
        if required:
            raise
        logger.error("no metrics: %s. The worker serves without metrics", error)  # noqa: TRY400 - the traceback adds nothing
        yield None
        return
    with sock:
        server = HttpServer(
            _app(scrape, ready),
            sock,
            max_connections=_MAX_CONNECTIONS,
            keep_alive_s=_KEEP_ALIVE_S,
            close_s=_CLOSE_S,
        )
        found: int = sock.getsockname()[1]
        async with serving(server):
            logger.info("listening metrics=http://%s:%d/metrics", f"[{host}]" if ":" in host else host, found)
            yield found


def _app(scrape: Callable[[], Awaitable[bytes]], ready: Callable[[], bool]) -> ASGIApp:
    async def metrics(_: Request) -> Response:
        return Response(await scrape(), headers={"Content-Type": CONTENT_TYPE})

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def readyz(_: Request) -> Response:
        if ready():
            return PlainTextResponse("serves\n")
        return PlainTextResponse("this process does not serve now; wait until workers have joined leaders\n", 503)

    return Router([Route("/metrics", metrics), Route("/healthz", healthz), Route("/readyz", readyz)])
