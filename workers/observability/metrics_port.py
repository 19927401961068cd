"""Serves `GET /metrics`, `/healthz` and `/readyz` of a worker. Serving does not depend on it: the worker also runs if the port is taken."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Generator

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from multiworld_serving.common.strict_http import ErrorResponse, StrictHttpProtocol
from multiworld_serving.workers.observability.metrics import WorkerMetrics

logger = logging.getLogger(__name__)

_MOST_SCRAPERS = 16
"""Concurrent connections; more are answered 503."""
_FULL = ErrorResponse(
    503, "full", f"more than {_MOST_SCRAPERS} connections are open here; close some, and try again later"
)
_CLOSE_S = 1
_TEXT = "text/plain; charset=utf-8"


@contextlib.asynccontextmanager
async def metrics_port(
    host: str,
    port: int | None,
    metrics: WorkerMetrics,
    refresh: Callable[[], None],
    ready: Callable[[], bool] = lambda: False,
) -> AsyncIterator[int | None]:
    """Serve the metrics while the block runs. Yields the port; None if `port` is None or cannot be bound.

    Args:
        port: 0 takes any free one; None serves nothing.
        refresh: called before each scrape to update gauges. Must not block.
        ready: returns whether the worker serves a leader now; called for each `GET /readyz`.
    """
    sock = None if port is None else _bind(host, port)
    if sock is None:
        yield None
        return
    with sock:
        found: int = sock.getsockname()[1]
        server = _Server(_config(_app(metrics, refresh, ready)))
        task = asyncio.create_task(server.serve(sockets=[sock]))
        logger.info("listening metrics=http://%s:%d/metrics", f"[{host}]" if ":" in host else host, found)
        try:
            yield found
        finally:
            server.should_exit = True
            await task


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the worker has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Protocol(StrictHttpProtocol):
    def _check_headers(self) -> ErrorResponse | None:
        return super()._check_headers() or (_FULL if len(self.connections) > _MOST_SCRAPERS else None)


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_CLOSE_S,
    )


def _bind(host: str, port: int) -> socket.socket | None:
    """A listening socket; None after logging an error if the port cannot be bound."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen()
    except OSError as error:
        sock.close()
        logger.error(  # noqa: TRY400 - the traceback adds nothing
            "no metrics: cannot listen on %s:%d: %s; the worker serves without metrics. Stop what listens there, or choose "
            "another --metrics-port (0 takes any free one) or --metrics-host",
            *(host, port, error.strerror or error),
        )
        return None
    sock.setblocking(False)
    return sock


def _app(metrics: WorkerMetrics, refresh: Callable[[], None], ready: Callable[[], bool]) -> ASGIApp:
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
                return ErrorResponse(503, "not_ready", "this worker serves no leader now; wait until it has joined one")
        return ErrorResponse(
            404, "not_found", "there is nothing at this path; there are /metrics, /healthz and /readyz"
        )

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        status, headers = 200, dict[str, str]()
        try:
            found = page(scope)
        except Exception:
            logger.exception("request failed path=%s", scope["path"][:256])
            found = ErrorResponse(500, "internal", "the worker failed on this request; its log has the traceback")
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
