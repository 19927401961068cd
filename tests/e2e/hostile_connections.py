"""Connections that are wrong: too slow, too many, half closed, or gone. Each attack returns how its connections ended."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from multiworld_serving.testing.load.images import photo
from tests.e2e.hostile_requests import HostileRequest

PATIENCE_S = 60.0
_CLOSED = "closed"
_POST = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n"
_WHOLE = _POST % len(photo()) + photo()


@dataclass(frozen=True)
class HostileConnections:
    """So many connections that do the same.

    Attributes:
        answer: how each of them must end; several ways are parted by "or".
    """

    name: str
    count: int
    act: Callable[[str, int], Awaitable[str]]
    answer: str


@asynccontextmanager
async def _connection(host: str, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


async def ask(host: str, port: int, request: HostileRequest, expected: str = "") -> str:
    """Status and reason of each answer, in order; equal ones that follow each other count once."""
    async with _connection(host, port) as (reader, writer):
        sending = asyncio.create_task(_send(writer, request.data))
        answers = [await _ending(reader)]
        while len(answers) <= (expected or request.answer).count(","):
            if (answer := await _ending(reader)) != answers[-1]:
                answers.append(answer)
        sending.cancel()
        return ", ".join(answers)


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(OSError):
        writer.write(data)
        await writer.drain()


async def _ending(reader: asyncio.StreamReader) -> str:
    """The next answer, or that there was none before the end."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            status = head.split()[1]
            length = next(
                (line.partition(":")[2] for line in head.splitlines() if line.startswith("content-length:")), "0"
            )
            body = await reader.readexactly(int(length))
            reason = json.loads(body).get("reason", "") if body and "application/json" in head else ""
            return f"{status} {reason}".strip()
    except (asyncio.IncompleteReadError, OSError):
        return _CLOSED
    except TimeoutError:
        return "OPEN"


async def _told(host: str, port: int, data: bytes) -> str:
    async with _connection(host, port) as (reader, writer):
        await _send(writer, data)
        return await _ending(reader)


async def _dripped(host: str, port: int, start: bytes) -> str:
    """A little more every now and then, for ever."""

    async def drip() -> None:
        await _send(writer, start)
        while True:
            await asyncio.sleep(0.25)
            await _send(writer, b"a")

    async with _connection(host, port) as (reader, writer):
        dripping = asyncio.create_task(drip())
        ending = await _ending(reader)
        dripping.cancel()
        return ending


async def _half_closed(host: str, port: int) -> str:
    async with _connection(host, port) as (reader, writer):
        await _send(writer, _WHOLE)
        writer.write_eof()
        return await _ending(reader)


async def _gone(host: str, port: int) -> str:
    async with _connection(host, port) as (_, writer):
        await _send(writer, _WHOLE)
    return _CLOSED


_HEAD = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: "
_REFUSED = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
_LONG = _POST % 1_000_000
SLOW_HEAD = HostileConnections("heads that do not end", 20, partial(_dripped, start=_HEAD), "408")
SILENT = HostileConnections("connections that say nothing", 200, partial(_told, data=b""), "closed or 408")
"""These two need HAProxy: uvicorn waits for them without a limit."""

HOSTILE_CONNECTIONS = (
    HostileConnections("bodies that never begin", 20, partial(_told, data=_LONG), "408 body_timeout"),
    HostileConnections("bodies of one byte at a time", 20, partial(_dripped, start=_LONG), "408 body_timeout"),
    HostileConnections("bodies after the rejection", 20, partial(_dripped, start=_REFUSED), "404 not_found"),
    HostileConnections("half closed after the request", 20, _half_closed, "200 or closed"),
    HostileConnections("gone before the response", 20, _gone, "closed"),
)


async def attack(host: str, port: int, hostile: HostileConnections) -> Counter[str]:
    """How they ended."""

    async def one() -> str:
        try:
            return await hostile.act(host, port)
        except OSError:
            return _CLOSED

    return Counter(await asyncio.gather(*(one() for _ in range(hostile.count))))
