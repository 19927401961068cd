"""The client side of a query: one question and one answer over a listening port, without joining a world.

A new process uses it to learn which world to join. The handshake authenticates both sides (see handshake.py), and the answer carries a
proof of the secret.
"""

import asyncio
from collections.abc import Awaitable, Callable

from multiworld.control.frames import MAX_HANDSHAKE_BYTES, Frame, FrameError, FrameReader, Heartbeat, Refuse
from multiworld.control.handshake import ClientHandshake, Hello
from multiworld.errors import AskError
from multiworld.texts import shown

_CONNECT_S = 5.0
"""Timeout of the TCP connection."""


async def ask(
    addr: str,
    port: int,
    question: str | Callable[[], Awaitable[str]],
    *,
    secret: bytes = b"",
    timeout_s: float = 10.0,
    bind_host: str = "",
) -> bytes:
    """Send `question` to the process that listens on `addr`:`port` and return its answer.

    Args:
        question: the text; or a function that returns it, called when the server has accepted the connection. It must return within
            a few seconds, because the server waits for the question.
        bind_host: the local address of the connection; empty lets the kernel choose.
        timeout_s: seconds for the whole query.
    Raises:
        PermissionError: the server refused our secret, or does not know it.
        AskError: no connection, no query handler on that port, the question was refused, or no answer within `timeout_s`.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await _connect(addr, port, bind_host)
            frames = FrameReader(MAX_HANDSHAKE_BYTES)
            greeting = await _next_frame(reader, frames)
            handshake = ClientHandshake(
                secret, Hello(question=question if isinstance(question, str) else await question())
            )
            writer.write(handshake.hello(greeting).encode())
            answer = await _next_frame(reader, frames)
    except TimeoutError:
        raise AskError(
            f"{addr}:{port} did not answer within {timeout_s:g} s; is it the port for joining (8001 of a leader), not one for HTTP?"
        ) from None
    except (OSError, FrameError) as error:
        raise AskError(f"{addr}:{port} cannot be queried: {error}") from error
    finally:
        if writer is not None:
            writer.close()
    if isinstance(answer, Refuse):
        reason = shown(answer.reason)
        if answer.retry:
            raise AskError(f"{addr}:{port}: {reason}")
        raise PermissionError(f"{addr}:{port} refused us: {reason}")
    return handshake.check_reply(answer)


async def _connect(addr: str, port: int, bind_host: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect. Raises OSError.

    The timeout is short because the kernel doubles the pause between its attempts; a new attempt by the caller succeeds sooner.
    """
    try:
        async with asyncio.timeout(_CONNECT_S):
            return await asyncio.open_connection(addr, port, local_addr=(bind_host, 0) if bind_host else None)
    except TimeoutError:
        raise OSError(
            f"no connection within {_CONNECT_S:g} s; is the address right, and do routes and firewalls let this machine through?"
        ) from None


async def _next_frame(reader: asyncio.StreamReader, frames: FrameReader) -> Frame:
    """Return the next frame that is not a heartbeat. Data after it is discarded; none is expected."""
    while True:
        data = await reader.read(1 << 16)
        if not data:
            raise FrameError("the connection ended")
        for frame in frames.feed(data):
            if not isinstance(frame, Heartbeat):
                return frame
