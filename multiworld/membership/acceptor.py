"""Accepts connections on a listening port that many worlds share.

A client authenticates; then it joins a world as a rank, or opens a data connection to a member of a forming world, or sends a query.
Everything except `bind` runs on the control loop's thread. The number, the input bytes and the lifetime of unauthenticated connections
are limited.
"""

import contextlib
import logging
import os
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from multiworld.control.connection import ControlConnection
from multiworld.control.frames import HEARTBEAT_BYTES, Frame, FrameError, Kind
from multiworld.control.handshake import Hello, ServerHandshake
from multiworld.control.loop import ControlLoop, Timer
from multiworld.control.sockets import close_in_child
from multiworld.membership.monitor import HeartbeatConfig, HostSession
from multiworld.membership.roster import Address
from multiworld.texts import shown

logger = logging.getLogger(__name__)

_MAX_AUTHENTICATED = 4096
_MAX_UNAUTHENTICATED = 512
"""Limit of unauthenticated connections. With one more the oldest is closed; a normal handshake takes milliseconds."""
_ACCEPTS_PER_ITERATION = 64
"""Connections accepted in one iteration of the control loop."""
_HANDSHAKE_S = 10.0
"""An unauthenticated connection is closed after this time."""
_MAX_HEARTBEATS = 1000
"""Heartbeats accepted from an unauthenticated connection: more than a slow handshake needs, too few to overload the control loop."""
_ANSWER_S = 60.0
"""A query without an answer is refused after this time."""
_ACCEPT_PAUSE_S = 0.5
"""Pause after `accept` failed, for example because the process has no free file descriptor."""

NO_ANSWER = "no answer to this question here"
QuestionHandler = Callable[[str, str, Callable[[bytes | str], None]], None]
"""(question, address of the client, answer): calls `answer`, at once or later and from any thread, with the answer as bytes, or with the
reason of a rejection as str."""


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


class PendingConnection:
    """An accepted connection, until it is admitted to a world, answered, or refused."""

    def __init__(
        self, acceptor: "Acceptor", control_loop: ControlLoop, sock: socket.socket, secrets: Sequence[bytes]
    ) -> None:
        self.connection = ControlConnection(control_loop, sock, self)
        self._authenticated = False
        self._heartbeats = 0  # received while unauthenticated
        self._handshake = ServerHandshake(*secrets)
        self._acceptor = acceptor
        self._control_loop = control_loop
        self._deadline: Timer = control_loop.call_later(_HANDSHAKE_S, self._on_handshake_timeout)
        self.connection.send(self._handshake.challenge().encode())

    def on_frame(self, connection: ControlConnection, frame: Frame) -> None:
        if frame.kind is Kind.HEARTBEAT:
            self._heartbeats += not self._authenticated
            if self._heartbeats > _MAX_HEARTBEATS:
                raise FrameError("too many heartbeats before authentication")
            return
        if self._authenticated:
            raise FrameError(f"unexpected {frame.kind.name} from a client that waits to be admitted")
        try:
            hello = self._handshake.accept(frame)
        except (PermissionError, FrameError) as error:
            logger.warning("refused a connection from %s: %s", connection.peer_host, error)
            self.refuse(str(error), retry=isinstance(error, FrameError))
            return
        self._authenticated = True
        self._deadline.cancel()
        self._acceptor.mark_authenticated(self, hello)
        if hello.question is not None:
            self._deadline = self._control_loop.call_later(_ANSWER_S, self.reply, NO_ANSWER)
            self._acceptor.handle_query(self, hello.question)
        elif hello.peer is not None:
            self._acceptor.connect_target(self, hello)
        else:
            connection.mark_authenticated()
            self.welcome()
            self._acceptor.admit_member(self, hello)

    def on_lost(self, connection: ControlConnection, reason: str) -> None:
        self._acceptor.discard(self)
        self._deadline.cancel()
        if not self._authenticated:
            logger.debug("a connection from %s was lost before authentication: %s", connection.peer_host, reason)

    def welcome(self) -> None:
        self.connection.send(self._handshake.welcome().encode())

    def refuse(self, reason: str, *, retry: bool) -> None:
        self.connection.send(Frame(Kind.REFUSE, (shown(reason).encode(), b"1" if retry else b"0")).encode())
        self.close()

    def reply(self, answer: bytes | str) -> None:
        """Send the answer (bytes), or refuse with a reason (str), and close the connection."""
        if isinstance(answer, str):
            self.refuse(answer, retry=True)
            return
        self.connection.send(self._handshake.reply(answer).encode())
        self.close()

    def close(self) -> None:
        self._deadline.cancel()
        self._acceptor.discard(self)
        self.connection.close()

    def _on_handshake_timeout(self) -> None:
        host = self.connection.peer_host
        logger.warning("refused a connection from %s: not authenticated within %.0f s", host, _HANDSHAKE_S)
        self.close()


class Acceptor:
    """One listening port or Unix socket. A connection for a world that is not open yet waits, so members may start in any order.

    Attributes:
        address: of the listening socket; the path of a Unix socket, which `close` deletes.
        port: of the listening socket; 0 for a Unix socket.
        secrets: a client must know one of these. Replace the whole sequence to change them; existing connections stay open.
        on_question: answers queries; with None they are refused.
    """

    def __init__(
        self, control_loop: ControlLoop, sock: socket.socket, secrets: Sequence[bytes], heartbeat: HeartbeatConfig
    ) -> None:
        self.address = sock.getsockname()
        self.port: int = self.address[1] if sock.family != socket.AF_UNIX else 0
        self.secrets = secrets
        self.on_question: QuestionHandler | None = None
        self._control_loop = control_loop
        self._sock = sock
        self._heartbeat = heartbeat
        self._sessions: dict[str, HostSession] = {}
        self._targets: dict[tuple[str, int], DataConnectionTarget] = {}
        self._authenticated: dict[PendingConnection, Hello] = {}  # oldest first
        self._unauthenticated: dict[PendingConnection, None] = {}  # oldest first
        self._heartbeat_timer: Timer | None = None

    def open(self) -> None:
        self._listen()
        self._heartbeat_timer = self._control_loop.call_at_multiple(self._heartbeat.interval_s, self._send_heartbeats)

    def close(self) -> None:
        """Stop listening and close the pending connections. Connections that a world has admitted stay open."""
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        self._control_loop.unregister(self._sock)
        self._sock.close()
        if isinstance(self.address, str):
            with contextlib.suppress(OSError):
                os.unlink(self.address)
        for pending in [*self._authenticated, *self._unauthenticated]:
            pending.close()

    def add_session(self, session: HostSession) -> None:
        """Admit members to the world of `session` from now on, including those that already wait for it."""
        self._sessions[session.member.world] = session
        session.start_if_complete()
        # Newest first: of two connections for one rank, the older one may be dead.
        for pending, hello in reversed(list(self._authenticated.items())):
            if hello.question is None and hello.peer is None and hello.world == session.member.world:
                self.admit_member(pending, hello)

    def remove_session(self, session: HostSession) -> None:
        """Admit no more members. Later connections wait for the next generation of the name."""
        if self._sessions.get(session.member.world) is session:
            del self._sessions[session.member.world]

    def admit_member(self, pending: PendingConnection, hello: Hello) -> None:
        """Admit an authenticated connection to its world, refuse it, or let it wait until the world opens."""
        session = self._sessions.get(hello.world)
        if session is None:
            return
        current, size = session.member.generation, session.member.size
        if hello.generation > current or (session.started and not hello.generation):
            return  # it waits for a later generation
        if hello.generation and (hello.generation < current or session.started):
            reason = f"generation {hello.generation} has formed already; the current one is {current}"
            pending.refuse(reason, retry=False)
        elif hello.size != size or not 0 < hello.rank < size:
            pending.refuse(f"rank {hello.rank} of {hello.size} cannot join a world of size {size}", retry=False)
        elif hello.settings != session.member.settings:
            reason = (
                f"the settings differ: rank 0 has {session.member.settings}; rank {hello.rank} has {hello.settings}"
            )
            pending.refuse(reason, retry=False)
        elif hello.rank in session.connections:
            pending.refuse(f"rank {hello.rank} is taken", retry=True)
        else:
            self.discard(pending)
            session.admit(hello.rank, pending.connection, Address(hello.host, hello.port, hello.local))

    def add_target(self, target: DataConnectionTarget) -> None:
        """Accept data connections for `target` from now on, including those that already wait for it."""
        self._targets[target.world, target.generation] = target
        for pending, hello in list(self._authenticated.items()):
            if hello.peer is not None:
                self.connect_target(pending, hello)

    def remove_target(self, target: DataConnectionTarget) -> None:
        if self._targets.get((target.world, target.generation)) is target:
            del self._targets[target.world, target.generation]

    def connect_target(self, pending: PendingConnection, hello: Hello) -> None:
        """Hand the socket of a data connection to its target, refuse it, or let it wait: START may arrive here later than at the client."""
        target = self._targets.get((hello.world, hello.generation))
        if target is None:
            return
        if (reason := target.rejection(hello)) is not None:
            pending.refuse(reason, retry=False)
        else:
            pending.welcome()
            sock = pending.connection.release_socket()
            self.discard(pending)
            target.admit(hello.rank, sock)

    def handle_query(self, pending: PendingConnection, question: str) -> None:
        if self.on_question is None:
            pending.reply(NO_ANSWER)
            return
        host = pending.connection.peer_host
        self.on_question(question, host, lambda answer: self._control_loop.call_soon(pending.reply, answer))

    def mark_authenticated(self, pending: PendingConnection, hello: Hello) -> None:
        del self._unauthenticated[pending]
        self._authenticated[pending] = hello

    def discard(self, pending: PendingConnection) -> None:
        self._authenticated.pop(pending, None)
        self._unauthenticated.pop(pending, None)

    def _listen(self) -> None:
        if self._sock.fileno() >= 0:
            self._control_loop.register(self._sock, selectors.EVENT_READ, self._on_readable)

    def _on_readable(self, _mask: int) -> None:
        for _ in range(_ACCEPTS_PER_ITERATION):
            try:
                sock = close_in_child(self._sock.accept()[0])
            except BlockingIOError:
                return
            except OSError as error:  # for example EMFILE: the connection stays in the backlog
                logger.warning("cannot accept connections on port %d for now: %s", self.port, error)
                self._control_loop.unregister(self._sock)
                self._control_loop.call_later(_ACCEPT_PAUSE_S, self._listen)
                return
            if len(self._authenticated) >= _MAX_AUTHENTICATED:
                sock.close()
                continue
            try:
                self._unauthenticated[PendingConnection(self, self._control_loop, sock, self.secrets)] = None
            except OSError:  # the client has closed it already
                sock.close()
            if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
                next(iter(self._unauthenticated)).close()

    def _send_heartbeats(self) -> None:
        """Send heartbeats to waiting connections, and close those that have sent none for the heartbeat timeout."""
        self._heartbeat_timer = self._control_loop.call_at_multiple(self._heartbeat.interval_s, self._send_heartbeats)
        for pending, hello in list(self._authenticated.items()):
            if hello.question is not None:
                continue
            if self._control_loop.now_s - pending.connection.last_received_s > self._heartbeat.timeout_s:
                logger.debug("closed the waiting connection from %s: no heartbeats", pending.connection.peer_host)
                pending.close()
            else:
                pending.connection.send(HEARTBEAT_BYTES)
