"""Asking a process that hosts worlds something, before there is a world: one question, one answer, over the same authenticated port.

This is how a newcomer learns which world it is wanted in. The secret never travels, a recorded exchange cannot be replayed, and the
answer is proven to come from a host that knows the secret.
"""

import asyncio

from multiworld.errors import AskError
from multiworld.frames import MAX_HANDSHAKE_BYTES, Frame, FrameError, FrameReader, Kind
from multiworld.handshake import GuestHandshake, Hello

_CONNECT_S = 5.0
"""How long the other side may take to accept the connection."""


async def ask(
    addr: str, port: int, question: str, *, secret: bytes = b"", timeout_s: float = 10.0, bind_host: str = ""
) -> bytes:
    """Ask the process that listens on `addr`:`port`; gives its answer.

    Args:
        bind_host: the address of this machine that the connection leaves from; empty lets the kernel choose.
    Raises:
        PermissionError: it refused our secret, or does not know it itself.
        AskError: nobody is there, nobody answers questions there, or no answer came within `timeout_s`.
    """
    handshake = GuestHandshake(secret, Hello(question=question))
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await _connect(addr, port, bind_host)
            frames = FrameReader(MAX_HANDSHAKE_BYTES)
            writer.write(handshake.hello(await _next_frame(reader, frames)).encode())
            answer = await _next_frame(reader, frames)
    except TimeoutError:
        raise AskError(f"{addr}:{port} did not answer within {timeout_s:g} s") from None
    except (OSError, FrameError) as error:
        raise AskError(f"{addr}:{port} cannot be asked: {error}") from error
    finally:
        if writer is not None:
            writer.close()
    if answer.kind is Kind.REFUSE and len(answer.fields) == 2:
        reason, retry = answer.fields
        if retry == b"1":
            raise AskError(f"{addr}:{port}: {reason.decode(errors='replace')}")
        raise PermissionError(f"{addr}:{port} refused us: {reason.decode(errors='replace')}")
    return handshake.check_reply(answer)


async def _connect(addr: str, port: int, bind_host: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises OSError. Gives up early: the kernel would try less and less often, and come late once the way is free again."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            return await asyncio.open_connection(addr, port, local_addr=(bind_host, 0) if bind_host else None)
    except TimeoutError:
        raise OSError(
            f"no connection within {_CONNECT_S:g} s; is the address right, and do routes and firewalls let this machine through?"
        ) from None


async def _next_frame(reader: asyncio.StreamReader, frames: FrameReader) -> Frame:
    """The next frame that says something. What comes behind it is not expected here and not kept."""
    while True:
        data = await reader.read(1 << 16)
        if not data:
            raise FrameError("the connection ended")
        for frame in frames.feed(data):
            if frame.kind is not Kind.HEARTBEAT:
                return frame
