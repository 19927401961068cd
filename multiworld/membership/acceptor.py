"""Accepts connections on a listening port that many worlds share.

A client authenticates; then it joins a world as a rank, or opens a data connection to a member of a forming world, or sends a query.
Everything except `bind` runs on the control loop's thread. The number, the input bytes and the lifetime of unauthenticated connections
are limited.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from multiworld.control.connection import ControlConnection
from multiworld.control.dial import read_frame, readable
from multiworld.control.frames import HEARTBEAT_BYTES, Address, Frame, FrameError, Heartbeat, Refuse
from multiworld.control.handshake import Hello, ServerHandshake
from multiworld.control.loop import ControlLoop
from multiworld.control.sockets import close_in_child
from multiworld.errors import AskError
from multiworld.membership.monitor import HeartbeatConfig, HostSession
from multiworld.texts import shown

logger = logging.getLogger(__name__)

_MAX_AUTHENTICATED = 4096
_MAX_UNAUTHENTICATED = 512
"""Limit of unauthenticated connections. With one more the oldest is closed; a normal handshake takes milliseconds."""
_ACCEPTS_PER_ITERATION = 64
"""Connections accepted in one iteration of the control loop."""
_HANDSHAKE_S = 10.0
"""An unauthenticated connection is closed after this time."""
_ANSWER_S = 60.0
"""A query without an answer, or a data connection whose world does not form here, is refused after this time."""
_ACCEPT_PAUSE_S = 0.5
"""Pause after `accept` failed, for example because the process has no free file descriptor."""
_MAX_REFUSALS = 100
"""Refused questions that are counted, by client and reason."""

_NO_ANSWER = "no answer to this question here"
Answerer = Callable[[str, str], Awaitable[bytes]]
"""(question, address of the client) → answer. To refuse the question it raises AskError; its text is sent to the client."""


def bind(host: str, port: int) -> socket.socket:
    """Return a non-blocking socket that listens on `host`. Port 0 takes a free one. Raises OSError, with the address in its message."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = close_in_child(socket.socket(family, socket.SOCK_STREAM))
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


class DataConnectionTarget(Protocol):
    """A member of a forming world that accepts data connections from the other members (multiworld/membership/mesh.py).

    `rejection` returns the reason to refuse a connection, or None. `admit` takes over the socket of an accepted one.
    """

    world: str
    generation: int

    def rejection(self, hello: Hello) -> str | None: ...

    def admit(self, rank: int, sock: socket.socket) -> None: ...


class _RefusedError(Exception):
    """The client is refused for this reason; `retry` if it may succeed later."""

    def __init__(self, reason: str, *, retry: bool) -> None:
        super().__init__(reason)
        self.frame = Refuse(shown(reason), retry).encode()


class Acceptor:
    """One listening port or Unix socket. A connection for a world that is not open yet waits, so members may start in any order.

    Attributes:
        address: of the listening socket; the path of a Unix socket, which `close` deletes.
        port: of the listening socket; 0 for a Unix socket.
        secrets: a client must know one of these. The owner may change the sequence; existing connections stay open.
        answerer: answers queries on an event loop; with None they are refused.
    """

    def __init__(
        self, control_loop: ControlLoop, sock: socket.socket, secrets: Sequence[bytes], heartbeat: HeartbeatConfig
    ) -> None:
        self.address = sock.getsockname()
        self.port: int = self.address[1] if sock.family != socket.AF_UNIX else 0
        self.secrets = secrets
        self.answerer: tuple[Answerer, asyncio.AbstractEventLoop] | None = None
        self._control_loop = control_loop
        self._sock = sock
        self._heartbeat = heartbeat
        self._sessions: dict[str, HostSession] = {}
        self._targets: dict[tuple[str, int], DataConnectionTarget] = {}
        self._target_added: asyncio.Future[None] = control_loop.loop.create_future()
        self._members: dict[ControlConnection, Hello] = {}  # authenticated, waiting for their world; oldest first
        self._clients: dict[asyncio.Task[None], socket.socket] = {}  # authenticated, waiting for an answer or a target
        self._strangers: dict[asyncio.Task[None], socket.socket] = {}  # not authenticated; oldest first
        self._refusals: Counter[tuple[str, str]] = Counter()
        self._heartbeat_timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._listen()
        self._heartbeat_timer = self._control_loop.call_at_multiple(self._heartbeat.interval_s, self._send_heartbeats)

    def close(self) -> None:
        """Stop listening and close the pending connections. Connections that a world has admitted stay open."""
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        if self._sock.fileno() >= 0:
            self._control_loop.loop.remove_reader(self._sock)
            self._sock.close()
        if isinstance(self.address, str):
            with contextlib.suppress(OSError):
                os.unlink(self.address)
        for task in (*self._strangers, *self._clients):
            task.cancel()
        for connection in self._members:
            connection.close()
        self._members.clear()

    # -- accepting -----------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._sock.fileno() >= 0:
            self._control_loop.loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_ITERATION):
            try:
                sock = close_in_child(self._sock.accept()[0])
            except BlockingIOError:
                return
            except OSError as error:  # for example EMFILE: the connection stays in the backlog
                logger.warning("cannot accept connections on port %d for now: %s", self.port, error)
                self._control_loop.loop.remove_reader(self._sock)
                self._control_loop.call_later(_ACCEPT_PAUSE_S, self._listen)
                return
            if len(self._members) + len(self._clients) >= _MAX_AUTHENTICATED:
                sock.close()
                continue
            sock.setblocking(False)
            task = self._control_loop.create_task(self._serve(sock))
            self._strangers[task] = sock
            task.add_done_callback(self._on_served)
            if len(self._strangers) > _MAX_UNAUTHENTICATED:
                oldest = next(iter(self._strangers))
                self._clients[oldest] = self._strangers.pop(oldest)
                oldest.cancel()

    def _on_served(self, task: asyncio.Task[None]) -> None:
        """Close the socket of a client, unless it was admitted."""
        sock = self._strangers.pop(task, None) or self._clients.pop(task, None)
        if sock is not None:
            sock.close()

    async def _serve(self, sock: socket.socket) -> None:
        """Authenticate a client. Then admit it, let it wait, answer it, or refuse it."""
        handshake, host = ServerHandshake(*self.secrets), "this host"
        task = asyncio.current_task()
        assert task is not None
        try:
            if sock.family != socket.AF_UNIX:
                host = sock.getpeername()[0]
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = await self._authenticate(sock, handshake, host)
            self._clients[task] = self._strangers.pop(task)
            if hello.question is not None:
                answer = handshake.reply(await self._answer(hello.question, host)).encode()
                async with asyncio.timeout(_HANDSHAKE_S):
                    await self._control_loop.loop.sock_sendall(sock, answer)
            elif hello.peer is not None:
                target = await self._target_of(sock, hello)
                sock.send(handshake.welcome().encode())
                del self._clients[task]
                target.admit(hello.rank, sock)
            else:
                sock.send(handshake.welcome().encode())
                del self._clients[task]
                connection = ControlConnection(self._control_loop, sock, self)
                self._members[connection] = hello
                self._admit_member(connection, hello)
        except _RefusedError as refusal:
            with contextlib.suppress(OSError):
                sock.send(refusal.frame)
        except OSError as error:
            logger.debug("a connection from %s was lost: %s", host, error)

    async def _authenticate(self, sock: socket.socket, handshake: ServerHandshake, host: str) -> Hello:
        """Raises _RefusedError and OSError."""
        sock.send(handshake.challenge().encode())
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                return handshake.accept(await read_frame(sock, _HANDSHAKE_S))
        except TimeoutError:
            logger.warning("refused a connection from %s: not authenticated within %.0f s", host, _HANDSHAKE_S)
            raise
        except (PermissionError, FrameError) as error:
            logger.warning("refused a connection from %s: %s", host, error)
            raise _RefusedError(str(error), retry=isinstance(error, FrameError)) from None

    # -- members -------------------------------------------------------------------------------------------------------------

    def add_session(self, session: HostSession) -> None:
        """Admit members to the world of `session` from now on, including those that already wait for it."""
        self._sessions[session.member.world] = session
        session.start_if_complete()
        # Newest first: of two connections for one rank, the older one may be dead.
        for connection, hello in reversed(list(self._members.items())):
            if hello.world == session.member.world:
                self._admit_member(connection, hello)

    def remove_session(self, session: HostSession) -> None:
        """Admit no more members. Later connections wait for the next generation of the name."""
        if self._sessions.get(session.member.world) is session:
            del self._sessions[session.member.world]

    def _admit_member(self, connection: ControlConnection, hello: Hello) -> None:
        """Admit a waiting member to its world, refuse it, or let it wait until the world opens."""
        session = self._sessions.get(hello.world)
        if session is None:
            return
        ours, retry = session.member, False
        if hello.generation > ours.generation or (session.started and not hello.generation):
            return  # it waits for a later generation
        if hello.generation and (hello.generation < ours.generation or session.started):
            reason = f"generation {hello.generation} has formed already; the current one is {ours.generation}"
        elif hello.size != ours.size or not 0 < hello.rank < ours.size:
            reason = f"rank {hello.rank} of {hello.size} cannot join a world of size {ours.size}"
        elif hello.settings != ours.settings:
            reason = f"the settings differ: rank 0 has {ours.settings}; rank {hello.rank} has {hello.settings}"
        elif hello.rank in session.connections:
            reason, retry = f"rank {hello.rank} is taken", True
        else:
            del self._members[connection]
            session.admit(hello.rank, connection, Address(hello.host, hello.port, hello.local))
            return
        del self._members[connection]
        connection.send(_RefusedError(reason, retry=retry).frame)
        connection.close()

    def on_frame(self, connection: ControlConnection, frame: Frame) -> None:
        if not isinstance(frame, Heartbeat):
            raise FrameError(f"unexpected {type(frame).__name__} from a client that waits to be admitted")

    def on_lost(self, connection: ControlConnection, reason: str) -> None:
        self._members.pop(connection, None)

    def _send_heartbeats(self) -> None:
        """Send heartbeats to waiting members. Close the connection of a member that has sent none within the heartbeat timeout."""
        self._heartbeat_timer = self._control_loop.call_at_multiple(self._heartbeat.interval_s, self._send_heartbeats)
        for connection, hello in list(self._members.items()):
            if self._control_loop.now_s - connection.last_received_s > self._heartbeat.timeout_s:
                logger.debug(
                    "world=%s: closed the waiting connection of rank %d: no heartbeats", hello.world, hello.rank
                )
                del self._members[connection]
                connection.close()
            else:
                connection.send(HEARTBEAT_BYTES)

    # -- data connections ----------------------------------------------------------------------------------------------------

    def add_target(self, target: DataConnectionTarget) -> None:
        """Accept data connections for `target`. Connections that already wait for it are accepted too."""
        self._targets[target.world, target.generation] = target
        self._target_added.set_result(None)
        self._target_added = self._control_loop.loop.create_future()

    def remove_target(self, target: DataConnectionTarget) -> None:
        if self._targets.get((target.world, target.generation)) is target:
            del self._targets[target.world, target.generation]

    async def _target_of(self, sock: socket.socket, hello: Hello) -> DataConnectionTarget:
        """Return the member that accepts a data connection; wait for it, because START may arrive here later than at the client."""
        while (target := self._targets.get((hello.world, hello.generation))) is None:
            if await readable(sock, _ANSWER_S, self._target_added):
                raise ConnectionError("it ended the connection, or sent data before the welcome")
        if (reason := target.rejection(hello)) is not None:
            raise _RefusedError(reason, retry=False)
        return target

    # -- queries -------------------------------------------------------------------------------------------------------------

    async def _answer(self, question: str, host: str) -> bytes:
        """Raises _RefusedError."""
        if self.answerer is None:
            raise _RefusedError(_NO_ANSWER, retry=True)
        answerer, loop = self.answerer

        async def answer() -> bytes:
            return await answerer(question, host)

        try:
            async with asyncio.timeout(_ANSWER_S):
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer(), loop))
        except AskError as rejection:
            reason = shown(str(rejection))
            self._log_refusal(host, reason)
            raise _RefusedError(reason, retry=True) from None
        except Exception as error:
            if not isinstance(error, TimeoutError):
                logger.exception("answering a question from %s failed", host)
            raise _RefusedError(_NO_ANSWER, retry=True) from None

    def _log_refusal(self, host: str, reason: str) -> None:
        """Log a refusal. A client that asks again and again is logged at its first, 10th, 100th … refusal."""
        if len(self._refusals) >= _MAX_REFUSALS:
            self._refusals.clear()
        self._refusals[host, reason] += 1
        if (times := str(self._refusals[host, reason])).strip("0") == "1":
            logger.warning("refused a question from %s times=%s: %s", host, times, reason)
