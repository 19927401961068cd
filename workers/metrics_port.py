"""`GET /metrics` of a worker, and what probes ask: `/healthz`, `/readyz`.

It is no part of serving: without it, or with its port taken, the worker works all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Generator

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from workers.metrics import WorkerMetrics

logger = logging.getLogger(__name__)

_MOST_SCRAPERS = 16
"""Connections at once; beyond it they get 503."""
_CLOSE_S = 1


@contextlib.asynccontextmanager
async def metrics_port(
    host: str,
    port: int | None,
    metrics: WorkerMetrics,
    refresh: Callable[[], None],
    ready: Callable[[], bool] = lambda: True,
) -> AsyncIterator[int | None]:
    """Serve the metrics while the block lasts. Gives the port; None when there is none, or it cannot be had.

    Args:
        port: 0 takes any free one; None serves nothing.
        refresh: called before each scrape, to set what is looked at only then. Must not block.
        ready: whether this worker holds a stage and a leader can send it batches.
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
    """Uvicorn without its signal handlers: the worker has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        limit_concurrency=_MOST_SCRAPERS,
        timeout_graceful_shutdown=_CLOSE_S,
    )


def _bind(host: str, port: int) -> socket.socket | None:
    """A listening socket; None, and an error in the log, when the port cannot be had."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen()
    except OSError as error:
        sock.close()
        logger.error(  # noqa: TRY400 - the traceback says nothing more
            "no metrics: cannot listen on %s:%d: %s; this worker serves without. Stop what listens there, or choose "
            "another --metrics-port (0 takes any free one) or --metrics-host",
            *(host, port, error.strerror or error),
        )
        return None
    sock.setblocking(False)
    return sock


def _app(metrics: WorkerMetrics, refresh: Callable[[], None], ready: Callable[[], bool]) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        status, text, content_type = 200, b"", "text/plain; charset=utf-8"
        if scope["path"] not in {"/metrics", "/healthz", "/readyz"}:
            status, text = 404, b"there are only /metrics, /healthz and /readyz\n"
        elif scope["method"] not in {"GET", "HEAD"}:
            status, text = 405, b"only GET\n"
        elif scope["path"] == "/healthz":
            text = b"alive\n"
        elif scope["path"] == "/readyz":
            status, text = (200, b"ready\n") if ready() else (503, b"not serving: no leader has given it a stage\n")
        else:
            refresh()
            accept = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
            text, content_type = metrics.exposition(accept)
        headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(text)).encode())]
        headers += [(b"allow", b"GET, HEAD")] if status == 405 else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    return answer
