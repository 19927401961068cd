"""Accepts connections on a listening port that many worlds share.

A client authenticates. Then it joins a world as a rank, opens a data connection to a member of a forming world, or sends a query.
Everything except `listen_on` runs on the control loop's thread. The number, the input bytes and the lifetime of unauthenticated connections
are limited.
"""

import asyncio
import contextlib
import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from multiworld.control.dial import close_in_child, read_frame, readable, reason_of
from multiworld.control.frames import HEARTBEAT_BYTES, FrameError, Refuse
from multiworld.control.handshake import Hello, ServerHandshake
from multiworld.control.loop import ControlLoop
from multiworld.errors import AskError
from multiworld.texts import one_line

logger = logging.getLogger(__name__)

_MAX_UNAUTHENTICATED = 512
"""Limit of unauthenticated connections. With one more the oldest is closed; a normal handshake takes milliseconds."""
_HANDSHAKE_S = 10.0
"""An unauthenticated connection is closed after this time."""
_ANSWER_S = 60.0
"""A query without an answer is refused after this time."""
_WAITING_S = 0.5
"""Interval of heartbeats to a member that waits for its world. A client gives up after 1 s without data."""
_ACCEPT_PAUSE_S = 0.5
"""Pause after `accept` failed, for example because the process has no free file descriptor."""
_LOG_INTERVAL_S = 1.0
"""Shortest interval between log lines about refused connections."""
_MAX_REFUSALS = 100
"""Refused questions that are remembered, by client and reason."""

_NO_ANSWER = "no answer to this question here"
Answerer = Callable[[str, str], Coroutine[Any, Any, bytes]]
"""(question, address of the client) → answer. To refuse the question it raises AskError; its text is sent to the client."""


def listen_on(address: tuple[str, int] | str) -> socket.socket:
    """Return a non-blocking socket that listens on an IP address and port, or on the path of a Unix socket. Port 0 takes a free one.

    Raises OSError, with the address in its message.
    """
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = close_in_child(socket.socket(family, socket.SOCK_STREAM))
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        where = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
        raise OSError(error.errno, f"cannot listen on {where}: {reason_of(error)}") from error
    return sock


class RejectedError(Exception):
    """The client is refused for this reason; `retry` if it may succeed later."""

    def __init__(self, reason: str, *, retry: bool = False) -> None:
        super().__init__(reason)
        self.frame = Refuse(one_line(reason), retry).encode()


class AdmissionTarget(Protocol):
    """What an authenticated client connects to: a world that it joins, or a member of a forming world that it sends data to.

    Attributes:
        key: name of the world, and its generation for data connections, else None.
    """

    key: tuple[str, int | None]

    def accepts(self, hello: Hello) -> bool:
        """Return whether `admit` can be called now. False lets the client wait. Raises RejectedError to refuse it."""

    def admit(self, hello: Hello, sock: socket.socket) -> None:
        """Take over the socket of an accepted client."""


class Acceptor:
    """One listening port or Unix socket. A connection for a world that is not open yet waits, so members may start in any order.

    Attributes:
        address: of the listening socket; the path of a Unix socket, which `close` deletes.
        port: of the listening socket; 0 for a Unix socket.
        secrets: a client must know one of these. The owner may change the sequence; existing connections stay open.
        keep_open: for the owner: the port stays open without a world.
        answerer: answers queries on an event loop; with None they are refused.
    """

    def __init__(self, control_loop: ControlLoop, sock: socket.socket, secrets: Sequence[bytes]) -> None:
        self.address = sock.getsockname()
        self.port: int = self.address[1] if sock.family != socket.AF_UNIX else 0
        self.secrets = secrets
        self.keep_open = False
        self.answerer: tuple[Answerer, asyncio.AbstractEventLoop] | None = None
        self._control_loop = control_loop
        self._sock = sock
        self._targets: dict[tuple[str, int | None], AdmissionTarget] = {}
        self._target_added: asyncio.Future[None] = control_loop.loop.create_future()
        self._logs_again_s, self._refused_unlogged = float("-inf"), 0
        self._newest: dict[tuple[object, ...], socket.socket] = {}  # of the clients that wait with equal names
        self._clients: dict[socket.socket, asyncio.Task[None]] = {}  # until they are admitted
        self._unauthenticated: dict[socket.socket, None] = {}  # the oldest first
        # Logs each refusal once, because a client asks again and again.
        self._log_refusal = functools.lru_cache(_MAX_REFUSALS)(_log_refusal)

    def open(self) -> None:
        """Start to accept connections."""
        if self._sock.fileno() >= 0:
            self._control_loop.loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        """Stop listening and close the pending connections. Connections that a world has admitted stay open."""
        if self._sock.fileno() >= 0:
            self._control_loop.loop.remove_reader(self._sock)
            self._sock.close()
        if isinstance(self.address, str):
            with contextlib.suppress(OSError):
                os.unlink(self.address)
        for task in self._clients.values():
            task.cancel()

    # -- accepting -----------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock = close_in_child(self._sock.accept()[0])
        except BlockingIOError:
            return
        except OSError as error:  # for example EMFILE: the connection stays in the backlog
            logger.warning("cannot accept connections on port %d for now: %s", self.port, error)
            self._control_loop.loop.remove_reader(self._sock)
            self._control_loop.loop.call_later(_ACCEPT_PAUSE_S, self.open)
            return
        sock.setblocking(False)
        task = self._control_loop.loop.create_task(self._serve(sock))
        self._clients[sock], self._unauthenticated[sock] = task, None
        task.add_done_callback(lambda _: self._on_served(sock))
        if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            self._clients[oldest].cancel()

    def _on_served(self, sock: socket.socket) -> None:
        """Close the socket of a client, unless it was admitted."""
        self._unauthenticated.pop(sock, None)
        if self._clients.pop(sock, None) is not None:
            sock.close()

    async def _serve(self, sock: socket.socket) -> None:
        """Authenticate a client. Then admit it, let it wait, answer it, or refuse it."""
        handshake, host = ServerHandshake(*self.secrets), "this host"
        try:
            if sock.family != socket.AF_UNIX:
                host = sock.getpeername()[0]
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = await self._authenticate(sock, handshake, host)
            self._unauthenticated.pop(sock, None)
            if hello.question is not None:
                answer = handshake.welcome(await self._answer(hello.question, host)).encode()
                async with asyncio.timeout(_HANDSHAKE_S):
                    await self._control_loop.loop.sock_sendall(sock, answer)
            else:
                target = await self._target_of(sock, hello)
                sock.send(handshake.welcome().encode())
                del self._clients[sock]
                target.admit(hello, sock)
        except RejectedError as refusal:
            with contextlib.suppress(OSError):
                sock.send(refusal.frame)
        except OSError as error:
            logger.debug("a connection from %s was lost: %s", host, error)

    async def _authenticate(self, sock: socket.socket, handshake: ServerHandshake, host: str) -> Hello:
        """Raises RejectedError and OSError."""
        sock.send(handshake.challenge().encode())
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                return handshake.accept(await read_frame(sock, _HANDSHAKE_S))
        except TimeoutError:
            self._log_refused(host, f"not authenticated within {_HANDSHAKE_S:.0f} s")
            raise
        except (PermissionError, FrameError) as error:
            self._log_refused(host, str(error))
            raise RejectedError(str(error), retry=isinstance(error, FrameError)) from None

    def _log_refused(self, host: str, why: str) -> None:
        """Log a connection that is refused. Strangers cause these lines, so there is at most one in `_LOG_INTERVAL_S`."""
        now_s = time.monotonic()
        if now_s < self._logs_again_s:
            self._refused_unlogged += 1
            return
        more = f" (and {self._refused_unlogged} more since the last such line)" if self._refused_unlogged else ""
        self._logs_again_s, self._refused_unlogged = now_s + _LOG_INTERVAL_S, 0
        logger.warning("refused a connection from %s: %s%s", host, why, more)

    # -- admission -----------------------------------------------------------------------------------------------------------

    def add(self, target: AdmissionTarget) -> None:
        """Admit clients to `target` from now on. Clients that wait for it are admitted, too."""
        self._targets[target.key] = target
        self._target_added.set_result(None)
        self._target_added = self._control_loop.loop.create_future()

    def remove(self, target: AdmissionTarget) -> None:
        """Admit no more clients. Later members wait for the next generation of the name."""
        if self._targets.get(target.key) is target:
            del self._targets[target.key]

    async def _target_of(self, sock: socket.socket, hello: Hello) -> AdmissionTarget:
        """Wait until a target accepts the client. Raises RejectedError, and OSError when the client has ended the connection."""
        key = hello.world, hello.generation if hello.peer is not None else None
        name = (*key, hello.rank, hello.peer)
        self._newest[name] = sock  # an older client of this name may be dead
        try:
            while True:
                target = self._targets.get(key)
                if target is not None and self._newest.get(name, sock) is sock and target.accepts(hello):
                    return target
                if hello.peer is None:
                    sock.send(HEARTBEAT_BYTES)
                if await readable(sock, _WAITING_S, self._target_added):
                    raise ConnectionError("it ended the connection, or sent data before the welcome")
        finally:
            if self._newest.get(name) is sock:
                del self._newest[name]

    # -- queries -------------------------------------------------------------------------------------------------------------

    async def _answer(self, question: str, host: str) -> bytes:
        """Raises RejectedError."""
        if self.answerer is None:
            raise RejectedError(_NO_ANSWER, retry=True)
        answerer, loop = self.answerer
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answerer(question, host), loop))
        except AskError as rejection:
            reason = one_line(str(rejection))
            self._log_refusal(host, reason)
            raise RejectedError(reason, retry=True) from None
        except Exception as error:
            if not isinstance(error, TimeoutError):
                logger.exception("answering a question from %s failed", host)
            raise RejectedError(_NO_ANSWER, retry=True) from None


def _log_refusal(host: str, reason: str) -> None:
    logger.warning("refused a question from %s: %s", host, reason)
