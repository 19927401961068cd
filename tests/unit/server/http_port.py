"""The HTTP port on a socket of this process, with the pipeline of `frontend_app` and clients that send raw bytes."""

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
from tests.unit.server.frontend_app import ColourPredictor, RunningFrontend, running_frontend
from tests.waiting import until

PATIENCE_S = 30.0


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


@dataclass
class Port:
    """The listening server and its dependencies."""

    number: int
    server: HttpServer
    frontend: RunningFrontend
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


@asynccontextmanager
async def http_port(
    predictor: ColourPredictor | None = None, *, app: ASGIApp | None = None, max_connections: int = 1000, **options: Any
) -> AsyncIterator[Port]:
    """Serve with these options of `HttpServer`. `app` replaces the application."""
    sock = bind("127.0.0.1", 0, "--http-port")
    number: int = sock.getsockname()[1]
    async with running_frontend(predictor) as frontend:
        server = HttpServer(app or frontend.app, sock, max_connections=max_connections, **options)
        async with serving(server):
            await until(lambda: server.started)
            port = Port(number, server, frontend)
            try:
                yield port
            finally:
                for client in port.clients:
                    await client.close()
