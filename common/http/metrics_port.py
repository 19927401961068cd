"""Serves `GET /metrics`, `/healthz` and `/readyz` of a worker or leader. A worker also runs if the port is taken."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from multiworld_serving.common.config import UserError
from multiworld_serving.common.http.connection_table import ConnectionLimits, ConnectionTable
from multiworld_serving.common.http.listener import bind
from multiworld_serving.common.http.server import HttpServer, serving
from multiworld_serving.common.http.strict import ErrorResponse
from multiworld_serving.common.metrics import ProgramMetrics

logger = logging.getLogger(__name__)

_LIMITS = ConnectionLimits(max_connections=16, idle_timeout_s=5.0)
_CLOSE_S = 1
_TEXT = "text/plain; charset=utf-8"


@contextlib.asynccontextmanager
async def metrics_port(
    host: str,
    port: int | None,
    metrics: ProgramMetrics,
    refresh: Callable[[], None],
    ready: Callable[[], bool] = lambda: False,
    *,
    required: bool = False,
) -> AsyncIterator[int | None]:
    """Serve the metrics while the block runs. Yields the port; None if `port` is None or cannot be bound.

    Args:
        port: 0 takes any free one; None serves nothing.
        refresh: called before each scrape to update gauges. Must not block.
        ready: returns whether the process serves now; called for each `GET /readyz`.
        required: whether to raise if the port cannot be bound.
    Raises:
        UserError: the port cannot be bound, and it is required.
    """
    if port is None:
        yield None
        return
    try:
        sock = bind(host, port, "--metrics-port", "--metrics-host")
    except UserError as error:
        if required:
            raise
        logger.error("no metrics: %s. The worker serves without metrics", error)  # noqa: TRY400 - the traceback adds nothing
        yield None
        return
    with sock:
        server = HttpServer(_app(metrics, refresh, ready), sock, ConnectionTable(_LIMITS), lifespan="off")
        server.set_graceful_timeout(_CLOSE_S)
        found: int = sock.getsockname()[1]
        async with serving(server):
            logger.info("listening metrics=http://%s:%d/metrics", f"[{host}]" if ":" in host else host, found)
            yield found


def _app(metrics: ProgramMetrics, refresh: Callable[[], None], ready: Callable[[], bool]) -> ASGIApp:
    def page(scope: Scope) -> tuple[bytes, str] | ErrorResponse:
        if scope["method"] not in {"GET", "HEAD"}:
            return ErrorResponse(405, "method_not_allowed", f"{scope['method']} is not allowed here; send GET or HEAD")
        match scope["path"]:
            case "/metrics":
                refresh()
                return metrics.exposition(dict(scope["headers"]).get(b"accept", b"").decode("latin-1"))
            case "/healthz":
                return b"alive\n", _TEXT
            case "/readyz" if ready():
                return b"serves\n", _TEXT
            case "/readyz":
                return ErrorResponse(
                    503, "not_ready", "this process does not serve now; wait until workers have joined leaders"
                )
        return ErrorResponse(
            404, "not_found", "there is nothing at this path; there are /metrics, /healthz and /readyz"
        )

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        status, headers = 200, dict[str, str]()
        try:
            found = page(scope)
        except Exception:
            logger.exception("request failed path=%s", scope["path"][:256])
            found = ErrorResponse(500, "internal", "the process failed on this request; its log has the traceback")
        if isinstance(found, ErrorResponse):
            status, headers, text = found.status, *found.headers_and_body()
        else:
            text, headers["content-type"] = found
        headers |= {"allow": "GET, HEAD"} if status == 405 else {}
        headers["content-length"] = str(len(text))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": text})

    return answer
