"""The HTTP port of a worker: its paths, errors, and malformed requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from multiworld_serving.common.http.metrics_port import metrics_port
from multiworld_serving.workers.observability.metrics import WorkerMetrics
from tests.unit.server.http_port import Client


def get(path: bytes, *lines: bytes, method: bytes = b"GET") -> bytes:
    return b"\r\n".join([method + b" " + path + b" HTTP/1.1", b"Host: x", *lines, b"", b""])


@asynccontextmanager
async def port(metrics: WorkerMetrics | None = None) -> AsyncIterator[Callable[[], Awaitable[Client]]]:
    clients: list[Client] = []
    async with metrics_port("127.0.0.1", 0, metrics or WorkerMetrics()) as number:
        assert number is not None

        async def opened() -> Client:
            clients.append(Client(*await asyncio.open_connection("127.0.0.1", number)))
            return clients[-1]

        try:
            yield opened
        finally:
            for client in clients:
                await client.close()


def failing() -> bool:
    raise RuntimeError("the GPU is gone")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (get(b"/nowhere"), 404),
        (get(b"/metrics", method=b"PUT"), 405),
        (get(b"/readyz"), 503),
        (get(b"/healthz"), 200),
    ],
)
async def test_request_gets_its_status(data: bytes, status: int) -> None:
    async with port() as opened:
        client = await opened()
        await client.say(data)
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 %d " % status)
