"""The HTTP port on a socket of this process, with the pipeline of `frontend_app` and clients that send raw bytes."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp

from multiworld_serving.common.http.listener import bind
from multiworld_serving.common.http.server import HttpServer, serving
from multiworld_serving.server.api.app import create_api
from multiworld_serving.server.api.groups import Groups
from multiworld_serving.server.api.inference import Inference
from multiworld_serving.server.http.limits import RequestLimits
from multiworld_serving.server.observability.frontend_metrics import FrontendMetrics
from tests.unit.server.frontend_app import MODEL, ColourPredictor, group_of
from tests.waiting import until

PATIENCE_S = 30.0


@dataclass
class Port:
    """The listening server and its dependencies."""

    number: int
    server: HttpServer
    predictor: ColourPredictor
    metrics: FrontendMetrics
    clients: list[Client] = field(default_factory=list)

    async def open(self, context: ssl.SSLContext | None = None) -> Client:
        """A new connection; with `context`, after the TLS handshake."""
        name = None if context is None else "localhost"
        opened = await asyncio.open_connection("127.0.0.1", self.number, ssl=context, server_hostname=name)
        self.clients.append(Client(*opened))
        return self.clients[-1]

    async def until_open(self, count: int) -> None:
        """Wait until this many connections are open."""
        await until(lambda: self.server.connections == count)


@dataclass
class Client:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def say(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, Any]]:
        """The next response: its status, and its JSON body."""
        async with asyncio.timeout(PATIENCE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = next(line.partition(":")[2] for line in head.splitlines() if line.startswith("content-length:"))
            return int(head.split()[1]), json.loads(await self.reader.readexactly(int(length)))

    async def rest(self) -> bytes:
        """All bytes until the other side closes; a reset counts as an end."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    async def healthy(self) -> bool:
        """Whether a plain request is answered here."""
        await self.say(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        return (await self.answer()) == (200, {"alive": True})

    async def close(self) -> None:
        self.writer.transport.abort()
        with suppress(OSError):
            await self.writer.wait_closed()


@asynccontextmanager
async def http_port(
    predictor: ColourPredictor | None = None,
    *,
    app: ASGIApp | None = None,
    context: ssl.SSLContext | None = None,
    max_connections: int = 1000,
    keep_alive_s: int = 75,
    timeout_s: float = 10.0,
    close_s: float = 3.0,
) -> AsyncIterator[Port]:
    """Serve with these limits. `app` replaces the application; with `context` the port uses TLS."""
    predictor, metrics = predictor or ColourPredictor(), FrontendMetrics()
    inference = Inference(predictor, MODEL, RequestLimits(timeout_s=timeout_s))
    app = app or create_api(Groups(group_of(predictor, metrics, inference)), metrics)
    sock = bind("127.0.0.1", 0, "--http-port")
    number: int = sock.getsockname()[1]
    server = HttpServer(
        app, sock, max_connections=max_connections, keep_alive_s=keep_alive_s, context=context, close_s=close_s
    )
    async with inference.threads, serving(server):
        await until(lambda: server.started)
        port = Port(number, server, predictor, metrics)
        try:
            yield port
        finally:
            for client in port.clients:
                await client.close()
