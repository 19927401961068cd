"""Connects to another process and authenticates, asks it a question, and reads the frames of a handshake.

A question gets one answer over a listening port, without joining a world. A new process uses it to learn which world to join. The handshake
authenticates both sides (see handshake.py), and the answer carries a proof of the secret.
"""

import asyncio
import contextlib
import ipaddress
import math
import os
import socket
import weakref
from collections.abc import Callable

from multiworld.control.frames import (
    MAX_HANDSHAKE_BYTES,
    Frame,
    FrameError,
    Heartbeat,
    Refuse,
    decode_frame,
    decode_length,
)
from multiworld.control.handshake import ClientHandshake, Hello, RefusedError
from multiworld.errors import AskError
from multiworld.texts import one_line

_CONNECT_S = 5.0
"""Timeout of the connection of `ask`. It is short, because the kernel doubles the pause between its attempts."""
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_child(sock: socket.socket) -> socket.socket:
    """Close the copy of `sock` in every forked child. Returns `sock`.

    A connection closes only when every process that holds it has closed it. If a child kept copies and its parent died, the other members
    would see missed heartbeats instead of a closed connection.
    """
    _open.add(sock)
    return sock


def _close_copies() -> None:
    for sock in list(_open):
        sock.close()  # no shutdown: the parent still uses the connection


os.register_at_fork(after_in_child=_close_copies)


async def dial(
    address: tuple[str, int] | str,
    secret: bytes,
    make_hello: Callable[[str], Hello],
    timeout_s: float,
    bind_host: str = "",
) -> socket.socket:
    """Connect to another process and wait until it admits us. Nothing is read from the returned socket after its `Welcome`.

    Args:
        address: an IP address and a port, or the path of a Unix socket.
        make_hello: returns our request. Called with the local address of the connection; may raise OSError.
        timeout_s: seconds to connect, and then seconds without data from the other process.
        bind_host: the local address of the connection; empty lets the kernel choose.
    Raises:
        RefusedError: another attempt cannot succeed.
        OSError, ValueError: see `reason_of`. Another attempt may succeed.
    """
    sock, challenge = await connect(address, timeout_s, bind_host)
    try:
        hello = make_hello("" if isinstance(address, str) else sock.getsockname()[0])
        await request(sock, challenge, secret, hello, timeout_s)
    except BaseException:
        sock.close()
        raise
    return sock


async def ask(
    addr: str,
    port: int,
    question: str,
    *,
    secret: bytes = b"",
    timeout_s: float = 10.0,
    bind_host: str = "",
) -> bytes:
    """Send `question` to the process that listens on `addr`:`port` and return its answer.

    Args:
        bind_host: the local address of the connection; empty lets the kernel choose.
        timeout_s: seconds for the whole query.
    Raises:
        PermissionError: the server refused our secret, or does not know it.
        AskError: no connection, no query handler on that port, the question was refused, or no answer within `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            sock, challenge = await _connect_to_any(addr, port, bind_host)
            with sock:
                return await request(sock, challenge, secret, Hello(question=question), math.inf)
    except RefusedError as refusal:
        raise PermissionError(f"{addr}:{port} refused us: {refusal}") from None
    except TimeoutError:
        raise AskError(
            f"{addr}:{port} did not answer within {timeout_s:g} s; is it the port for joining (8001 of a leader), not one for HTTP?"
        ) from None
    except (OSError, FrameError) as error:
        raise AskError(f"{addr}:{port} cannot be queried: {reason_of(error)}") from error


async def _connect_to_any(addr: str, port: int, bind_host: str) -> tuple[socket.socket, Frame]:
    """Connect to the first address of a name that can be reached. Errors as in `dial`."""
    *others, last = await resolve(addr)
    for host in others:
        with contextlib.suppress(OSError):
            return await connect((host, port), _CONNECT_S, bind_host)
    return await connect((last, port), _CONNECT_S, bind_host)


async def request(sock: socket.socket, challenge: Frame, secret: bytes, hello: Hello, timeout_s: float) -> bytes:
    """Send our request and wait for the `Welcome`. Returns its answer. Errors as in `dial`."""
    handshake = ClientHandshake(secret, hello)
    await asyncio.get_running_loop().sock_sendall(sock, handshake.hello(challenge).encode())
    return handshake.check_welcome(await next_frame(sock, timeout_s))


async def connect(address: tuple[str, int] | str, timeout_s: float, bind_host: str = "") -> tuple[socket.socket, Frame]:
    """Connect to another process. Returns the socket and the first frame. Arguments and errors as in `dial`."""
    local = isinstance(address, str)
    family = socket.AF_UNIX if local else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = close_in_child(socket.socket(family, socket.SOCK_STREAM))
    try:
        sock.setblocking(False)
        if not local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if bind_host and not local:
            sock.bind((bind_host, 0))
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(sock, address)
        except TimeoutError:
            raise OSError(
                f"no connection within {timeout_s:g} s; is the address right, and do routes and firewalls let this machine through?"
            ) from None
        # TCP simultaneous open: on loopback, a client that retries a free ephemeral port can connect to itself.
        if not local and sock.getsockname() == sock.getpeername():
            raise OSError("no process listens there")
        return sock, await next_frame(sock, timeout_s)
    except BaseException:
        sock.close()
        raise


async def resolve(addr: str) -> list[str]:
    """Return the IP addresses of a name, without blocking the event loop. An IP address needs no thread. Raises OSError."""
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(addr))]
    found = await asyncio.get_running_loop().getaddrinfo(addr, None, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in found]


def reason_of(error: Exception) -> str:
    """Return why an attempt to connect failed, as text."""
    if isinstance(error, TimeoutError | BlockingIOError):
        return "no answer"
    if isinstance(error, OSError) and error.errno and error.errno > 0:  # not of the resolver
        return os.strerror(error.errno)  # asyncio's text begins with the number
    return str(error)


async def next_frame(sock: socket.socket, timeout_s: float) -> Frame:
    """Return the next frame that is not a heartbeat. Raises RefusedError, or ConnectionError if a retry may succeed, for a refusal."""
    while isinstance(frame := await read_frame(sock, timeout_s), Heartbeat):
        pass
    if isinstance(frame, Refuse):
        reason = one_line(frame.reason)
        raise ConnectionError(reason) if frame.retry else RefusedError(reason)
    return frame


async def read_frame(sock: socket.socket, timeout_s: float) -> Frame:
    """Read one frame of a handshake and nothing after it. Raises FrameError, OSError; BlockingIOError after `timeout_s` without data."""
    length = decode_length(await _read(sock, 4, timeout_s), MAX_HANDSHAKE_BYTES)
    return decode_frame(await _read(sock, length, timeout_s))


async def _read(sock: socket.socket, count: int, timeout_s: float) -> bytes:
    data = b""
    while len(data) < count:
        try:
            more = sock.recv(count - len(data))
        except BlockingIOError:
            if not await readable(sock, timeout_s):
                raise
            continue
        if not more:
            raise ConnectionError("the connection was lost")
        data += more
    return data


async def readable(sock: socket.socket, timeout_s: float, *others: asyncio.Future[None]) -> bool:
    """Wait until `sock` is readable, one of `others` is done, or `timeout_s` has passed. Returns whether it is readable."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        if not ready.done():
            ready.set_result(None)

    fd = sock.fileno()  # selectors format a socket that they do not know, with two system calls each time
    loop.add_reader(fd, on_readable)
    try:
        # Unlike `sock_recv` with a timeout, it loses no data if this process did not run when it arrived.
        await asyncio.wait((ready, *others), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loop.remove_reader(fd)
    return ready.done()


def local_host(addr: str, port: int) -> str:
    """Return the local address of the route to `addr`. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(addr, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.connect(address)  # sends nothing
        return str(sock.getsockname()[0])
