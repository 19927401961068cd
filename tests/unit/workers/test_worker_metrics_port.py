"""The HTTP port of a worker is as strict as that of the leader, with the same error format."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from multiworld_serving.common.http import metrics_port as metrics_port_module
from multiworld_serving.common.http.connection_table import ConnectionLimits
from multiworld_serving.common.http.metrics_port import metrics_port
from multiworld_serving.workers.observability.metrics import WorkerMetrics
from tests.unit.server.http_port import Client

OPENMETRICS = b"application/openmetrics-text; version=abc"


def get(path: bytes, *lines: bytes, method: bytes = b"GET") -> bytes:
    return b"\r\n".join([method + b" " + path + b" HTTP/1.1", b"Host: x", *lines, b"", b""])


@asynccontextmanager
async def port(refresh: Callable[[], None] = lambda: None) -> AsyncIterator[Callable[[], Awaitable[Client]]]:
    clients: list[Client] = []
    async with metrics_port("127.0.0.1", 0, WorkerMetrics(), refresh) as number:
        assert number is not None

        async def opened() -> Client:
            clients.append(Client(*await asyncio.open_connection("127.0.0.1", number)))
            return clients[-1]

        try:
            yield opened
        finally:
            for client in clients:
                await client.close()


def failing() -> None:
    raise RuntimeError("the GPU is gone")


@pytest.mark.parametrize(
    ("data", "status", "reason"),
    [
        (b"hello\r\n\r\n", 400, "malformed"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400, "malformed"),
        (get(b"/metrics", b"Host: x"), 400, "malformed"),
        (get(b"/metrics", b"Transfer-Encoding: gzip, chunked"), 501, "not_implemented"),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 505, "http_version_not_supported"),
        (get(b"/nowhere"), 404, "not_found"),
        (get(b"/metrics", method=b"PUT"), 405, "method_not_allowed"),
        (get(b"/readyz"), 503, "not_ready"),
    ],
)
async def test_wrong_request_gets_an_error_in_the_common_format(data: bytes, status: int, reason: str) -> None:
    async with port() as opened:
        client = await opened()
        await client.say(data)
        found, answer = await client.answer()
        assert (found, answer["reason"], set(answer)) == (status, reason, {"error", "reason", "request_id"})


async def test_internal_error_has_the_common_format(caplog: pytest.LogCaptureFixture) -> None:
    async with port(failing) as opened:
        client = await opened()
        await client.say(get(b"/metrics"))
        status, answer = await client.answer()
        assert (status, answer["reason"]) == (500, "internal")
    assert sum("the GPU is gone" in (record.exc_text or "") for record in caplog.records) == 1


@pytest.mark.parametrize("line", [b"Accept: " + OPENMETRICS, b"Connection: Upgrade\r\nUpgrade: h2c"])
async def test_worker_port_continues_after_a_malformed_request(line: bytes) -> None:
    async with port() as opened:
        client = await opened()
        await client.say(get(b"/metrics", line, method=b"HEAD") * 2 + b"bad\r\n\r\n")
        assert re.findall(rb"HTTP/1\.1 (\d+) ", await client.rest()) == [b"200", b"200", b"400"]


async def test_worker_port_replaces_an_idle_connection_when_too_many_are_open() -> None:
    async with port() as opened:
        clients = [await opened() for _ in range(17)]
        assert await clients[0].rest() == b""
        await clients[-1].say(get(b"/healthz", b"Connection: close"))
        assert (await clients[-1].rest()).startswith(b"HTTP/1.1 200 ")


async def test_worker_port_closes_a_connection_when_its_headers_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_port_module, "_LIMITS", ConnectionLimits(max_connections=16, header_timeout_s=0.2))
    async with port() as opened:
        client = await opened()
        await client.say(b"GET /metrics HTTP/1.1\r\nHost:")
        status, answer = await client.answer()
        assert (status, answer["reason"]) == (408, "head")
        assert await client.rest() == b""
