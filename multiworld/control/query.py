"""The client side of a query: one question and one answer over a listening port, without joining a world.

A new process uses it to learn which world to join. The handshake authenticates both sides (see handshake.py), and the answer carries a
proof of the secret.
"""

import asyncio
import contextlib
import math
import socket
from collections.abc import Awaitable, Callable

from multiworld.control.dial import connect, reason_of, request, resolve
from multiworld.control.frames import Frame, FrameError
from multiworld.control.handshake import Hello, RefusedError
from multiworld.errors import AskError

_CONNECT_S = 5.0
"""Timeout of the connection. It is short, because the kernel doubles the pause between its attempts."""


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
    try:
        async with asyncio.timeout(timeout_s):
            sock, challenge = await _connect(addr, port, bind_host)
            with sock:
                text = question if isinstance(question, str) else await question()
                return await request(sock, challenge, secret, Hello(question=text), math.inf)
    except RefusedError as refusal:
        raise PermissionError(f"{addr}:{port} refused us: {refusal}") from None
    except TimeoutError:
        raise AskError(
            f"{addr}:{port} did not answer within {timeout_s:g} s; is it the port for joining (8001 of a leader), not one for HTTP?"
        ) from None
    except (OSError, FrameError) as error:
        raise AskError(f"{addr}:{port} cannot be queried: {reason_of(error)}") from error


async def _connect(addr: str, port: int, bind_host: str) -> tuple[socket.socket, Frame]:
    """Connect to the first address of a name that can be reached. Errors as in `connect`."""
    *others, last = await resolve(addr)
    for host in others:
        with contextlib.suppress(OSError):
            return await connect((host, port), _CONNECT_S, bind_host)
    return await connect((last, port), _CONNECT_S, bind_host)
