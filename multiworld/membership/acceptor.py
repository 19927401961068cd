"""Accepts connections on a listening port that many worlds share.

A client authenticates and then joins a world as a rank, hands its socket to a forming world as a data connection, or sends a query.
Everything but `bind` runs on the control loop's thread. The number, the input bytes and the lifetime of unauthenticated connections are
limited.
"""

import logging
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from multiworld.control.connection import ControlConnection
from multiworld.control.frames import HEARTBEAT_BYTES, Frame, FrameError, Kind
from multiworld.control.handshake import Hello, ServerHandshake
from multiworld.control.loop import Timer, WatchDog
from multiworld.control.sockets import not_inherited
from multiworld.errors import Cause
from multiworld.membership.monitor import HeartbeatConfig, HostSession
from multiworld.texts import shown

logger = logging.getLogger(__name__)

_MAX_GUESTS = 4096
_MAX_STRANGERS = 512
"""Limit of unauthenticated connections. One more closes the oldest; a normal handshake takes milliseconds."""
_ACCEPTS_A_ROUND = 64
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
    sock = not_inherited(socket.socket(family, socket.SOCK_STREAM))
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


class LineHost(Protocol):
    """A member of a forming world that accepts data connections from the other members (multiworld/membership/mesh.py).

    `rejection` returns the reason to refuse a connection, or None. `admit` takes over the socket of an accepted one.
    """

    world: str
    epoch: int

    def rejection(self, hello: Hello) -> str | None: ...

    def admit(self, rank: int, sock: socket.socket) -> None: ...


class PendingConnection:
    """An accepted connection, until it is admitted to a world, answered, or refused.

    Attributes:
        hello: the client's request; None while the client is not authenticated.
    """

    def __init__(
        self, reception: "Acceptor", watchdog: WatchDog, sock: socket.socket, secrets: Sequence[bytes]
    ) -> None:
        self.hello: Hello | None = None
        self._heartbeats = 0  # received while unauthenticated
        self.lifeline = ControlConnection(watchdog, sock, self)
        self._handshake = ServerHandshake(*secrets)
        self._reception = reception
        self._watchdog = watchdog
        self._deadline: Timer = watchdog.call_later(_HANDSHAKE_S, self._overdue)
        self.lifeline.send(self._handshake.challenge().encode())

    def on_frame(self, lifeline: ControlConnection, frame: Frame) -> None:
        if frame.kind is Kind.HEARTBEAT:
            self._heartbeats += self.hello is None
            if self._heartbeats > _MAX_HEARTBEATS:
                raise FrameError("heartbeats and no proof")
            return
        if self.hello is not None:
            raise FrameError(f"unexpected {frame.kind.name} from a guest that waits")
        try:
            hello = self._handshake.accept(frame)
        except (PermissionError, FrameError) as error:
            logger.warning("refused a connection from %s: %s", lifeline.peer_host, error)
            self.refuse(str(error), retry=isinstance(error, FrameError))
            return
        self.hello = hello
        self._deadline.cancel()
        self._reception.recognise(self)
        if hello.question is not None:
            self._deadline = self._watchdog.call_later(_ANSWER_S, self.reply, NO_ANSWER)
            self._reception.question(self, hello.question)
            return
        if hello.peer is not None:
            self._reception.connect(self)
            return
        lifeline.trust()
        self.welcome()
        self._reception.seat(self)

    def on_lost(self, lifeline: ControlConnection, reason: str) -> None:
        self._reception.forget(self)
        self._deadline.cancel()
        if self.hello is None:
            logger.debug("a connection from %s ended before its proof: %s", lifeline.peer_host, reason)

    def welcome(self) -> None:
        self.lifeline.send(self._handshake.welcome().encode())

    def refuse(self, reason: str, *, retry: bool) -> None:
        self.lifeline.send(Frame(Kind.REFUSE, (shown(reason).encode(), b"1" if retry else b"0")).encode())
        self.show_out()

    def reply(self, answer: bytes | str) -> None:
        """Send the answer (bytes), or refuse with a reason (str), and close the connection."""
        if isinstance(answer, str):
            self.refuse(answer, retry=True)
            return
        self.lifeline.send(self._handshake.reply(answer).encode())
        self.show_out()

    def show_out(self) -> None:
        self._deadline.cancel()
        self._reception.forget(self)
        self.lifeline.close()

    def _overdue(self) -> None:
        logger.warning("refused a connection from %s: no proof within %.0f s", self.lifeline.peer_host, _HANDSHAKE_S)
        self.show_out()


class Acceptor:
    """One listening port. A connection for a world that is not open yet waits, so members may start in any order.

    Attributes:
        secrets: a client must know one of these. Replace the whole sequence to change them; existing connections stay open.
        on_question: answers queries; with None they are refused.
    """

    def __init__(
        self, watchdog: WatchDog, sock: socket.socket, secrets: Sequence[bytes], pulse: HeartbeatConfig
    ) -> None:
        self.port: int = sock.getsockname()[1]
        self.secrets = secrets
        self.on_question: QuestionHandler | None = None
        self._watchdog = watchdog
        self._sock = sock
        self._pulse = pulse
        self._rosters: dict[str, HostSession] = {}
        self._line_hosts: dict[tuple[str, int], LineHost] = {}
        self._guests: dict[PendingConnection, None] = {}  # authenticated and waiting, oldest first
        self._strangers: dict[PendingConnection, None] = {}  # unauthenticated, oldest first
        self._beat_timer: Timer | None = None

    def open(self) -> None:
        self._listen()
        self._beat_timer = self._watchdog.call_later(self._pulse.interval_s, self._beat)

    def close(self) -> None:
        """Stop listening and close the pending connections. Connections that a world has admitted stay open."""
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        self._watchdog.unregister(self._sock)
        self._sock.close()
        for guest in [*self._guests, *self._strangers]:
            guest.show_out()

    def host(self, roster: HostSession) -> None:
        """Admit members to this world from now on, including those already waiting for it."""
        self._rosters[roster.seat.world] = roster
        roster.start_when_full()
        for guest in reversed(
            list(self._guests)
        ):  # newest first: of two connections for one rank the older may be dead
            if guest.hello is not None and guest.hello.question is None and guest.hello.world == roster.seat.world:
                self.seat(guest)

    def unhost(self, roster: HostSession) -> None:
        """Stop admitting members to this world. Later connections wait for the next generation of its name."""
        if self._rosters.get(roster.seat.world) is roster:
            del self._rosters[roster.seat.world]

    def seat(self, guest: PendingConnection) -> None:
        """Admit an authenticated connection to its world, refuse it, or let it wait until the world opens."""
        hello = guest.hello
        assert hello is not None
        roster = self._rosters.get(hello.world)
        if roster is None or hello.epoch > roster.seat.epoch or (roster.started and not hello.epoch):
            return  # waits for a generation that is not open yet
        if hello.epoch and (hello.epoch < roster.seat.epoch or roster.started):
            guest.refuse(f"epoch {hello.epoch} has formed already, the current one is {roster.seat.epoch}", retry=False)
        elif hello.size != roster.seat.size or not 0 < hello.rank < roster.seat.size:
            guest.refuse(
                f"rank {hello.rank} of {hello.size} asked for a seat in a world of {roster.seat.size}", retry=False
            )
        elif hello.rank in roster.lifelines:
            guest.refuse(f"rank {hello.rank} is taken", retry=True)
        else:
            self.forget(guest)
            roster.admit(hello.rank, guest.lifeline)

    def expect(self, host: LineHost) -> None:
        """Accept data connections for `host` from now on."""
        self._line_hosts[host.world, host.epoch] = host

    def expect_no_more(self, host: LineHost) -> None:
        if self._line_hosts.get((host.world, host.epoch)) is host:
            del self._line_hosts[host.world, host.epoch]

    def connect(self, guest: PendingConnection) -> None:
        """Hand the socket to the member that it is for, or refuse it."""
        hello = guest.hello
        assert hello is not None
        host = self._line_hosts.get((hello.world, hello.epoch))
        reason = f"epoch {hello.epoch} of {hello.world!r} does not form here" if host is None else host.rejection(hello)
        if host is None or reason is not None:
            guest.refuse(reason or "", retry=False)
            return
        guest.welcome()
        sock = guest.lifeline.hand_over()
        self.forget(guest)
        host.admit(hello.rank, sock)

    def question(self, guest: PendingConnection, text: str) -> None:
        if self.on_question is None:
            guest.reply(NO_ANSWER)
            return
        self.on_question(text, guest.lifeline.peer_host, lambda answer: self._watchdog.call_soon(guest.reply, answer))

    def recognise(self, guest: PendingConnection) -> None:
        """Mark a connection as authenticated."""
        del self._strangers[guest]
        self._guests[guest] = None

    def forget(self, guest: PendingConnection) -> None:
        self._guests.pop(guest, None)
        self._strangers.pop(guest, None)

    def _listen(self) -> None:
        if self._sock.fileno() >= 0:
            self._watchdog.register(self._sock, selectors.EVENT_READ, self._on_readable)

    def _on_readable(self, _mask: int) -> None:
        for _ in range(_ACCEPTS_A_ROUND):
            try:
                sock = not_inherited(self._sock.accept()[0])
            except BlockingIOError:
                return
            except OSError as error:  # for example EMFILE: the connection stays in the backlog
                logger.warning("cannot accept connections on port %d for now: %s", self.port, error)
                self._watchdog.unregister(self._sock)
                self._watchdog.call_later(_ACCEPT_PAUSE_S, self._listen)
                return
            if len(self._guests) >= _MAX_GUESTS:
                sock.close()
                continue
            try:
                self._strangers[PendingConnection(self, self._watchdog, sock, self.secrets)] = None
            except OSError:  # the client has closed it already
                sock.close()
            if len(self._strangers) > _MAX_STRANGERS:
                next(iter(self._strangers)).show_out()

    def _beat(self) -> None:
        """Send heartbeats to waiting connections, and close those without heartbeats for the timeout."""
        self._beat_timer = self._watchdog.call_later(self._pulse.interval_s, self._beat)
        for guest in list(self._guests):
            if guest.hello is None or guest.hello.question is not None:
                continue
            if self._watchdog.now_s - guest.lifeline.last_heard_s > self._pulse.timeout_s:
                logger.debug("a guest from %s fell silent: %s", guest.lifeline.peer_host, Cause.HANG)
                guest.show_out()
            else:
                guest.lifeline.send(HEARTBEAT_BYTES)
