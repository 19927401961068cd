"""Where connections arrive: a listening port that many worlds share. Guests prove themselves, then take a seat, give their connection
to a member of a world that forms, or ask a question.

Runs on the watchdog's thread, save `bind`. What strangers may cost is bounded: guests, bytes before the proof, and time.
"""

import logging
import selectors
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from multiworld.errors import Cause
from multiworld.frames import HEARTBEAT_BYTES, Frame, FrameError, Kind
from multiworld.handshake import Hello, HostHandshake
from multiworld.lifeline import Lifeline
from multiworld.rendezvous import Pulse, Roster
from multiworld.watchdog import Timer, WatchDog

logger = logging.getLogger(__name__)

_MAX_GUESTS = 4096
_MAX_STRANGERS = 512
"""Guests that have not proven themselves. One more, and the oldest goes: a proof takes milliseconds, only a flood is slower."""
_ACCEPTS_A_ROUND = 64
"""Connections taken before the other sockets of the watchdog have their turn."""
_HANDSHAKE_S = 10.0
"""A guest that has not proven itself by then is shown out."""
_MAX_HEARTBEATS = 1000
"""Of a guest that has not proven itself: far more than one sends that we keep waiting, and too few to keep the watchdog busy."""
_ANSWER_S = 60.0
"""A guest whose question has found no answer by then is shown out."""

_ACCEPT_PAUSE_S = 0.5
"""How long no connection is accepted after the kernel refused one, for want of descriptors say."""

QuestionHandler = Callable[[str, str, Callable[[bytes | None], None]], None]
"""(question, host of who asks, answer): calls `answer`, at once or later and from any thread; None when there is none to give."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on `host` alone; port 0 takes a free one. Raises OSError, with the address in its text."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
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
    """A member of a world that forms, and lets the others connect their lines (multiworld/meeting.py)."""

    world: str
    epoch: int

    def refusal(self, hello: Hello) -> str | None: ...

    def admit(self, rank: int, sock: socket.socket) -> None: ...


class Guest:
    """One accepted connection until it has a seat, an answer, or the door."""

    def __init__(
        self, reception: "Reception", watchdog: WatchDog, sock: socket.socket, secrets: Sequence[bytes]
    ) -> None:
        self.hello: Hello | None = None
        self._heartbeats = 0  # before its proof
        self.lifeline = Lifeline(watchdog, sock, self)
        self._handshake = HostHandshake(*secrets)
        self._reception = reception
        self._watchdog = watchdog
        self._deadline: Timer = watchdog.call_later(_HANDSHAKE_S, self._overdue)
        self.lifeline.send(self._handshake.challenge().encode())

    def on_frame(self, lifeline: Lifeline, frame: Frame) -> None:
        if frame.kind is Kind.HEARTBEAT:
            self._heartbeats += self.hello is None
            if self._heartbeats > _MAX_HEARTBEATS:
                raise FrameError("heartbeats and no proof")
            return
        if self.hello is not None:
            raise FrameError(f"unexpected {frame.kind.name} from a guest that waits")
        try:
            hello = self._handshake.accept(frame)
        except PermissionError as error:
            logger.warning("refused a connection from %s: %s", lifeline.peer_host, error)
            self.refuse(str(error), retry=False)
            return
        self.hello = hello
        self._deadline.cancel()
        self._reception.recognise(self)
        if hello.question is not None:
            self._deadline = self._watchdog.call_later(_ANSWER_S, self.reply, None)
            self._reception.question(self, hello.question)
            return
        if hello.peer is not None:
            self._reception.connect(self)
            return
        lifeline.trust()
        self.welcome()
        self._reception.seat(self)

    def on_lost(self, lifeline: Lifeline, reason: str) -> None:
        self._reception.forget(self)
        self._deadline.cancel()
        if self.hello is None:
            logger.debug("a connection from %s ended before its proof: %s", lifeline.peer_host, reason)

    def welcome(self) -> None:
        self.lifeline.send(self._handshake.welcome().encode())

    def refuse(self, reason: str, *, retry: bool) -> None:
        self.lifeline.send(Frame(Kind.REFUSE, (reason.encode(), b"1" if retry else b"0")).encode())
        self.show_out()

    def reply(self, answer: bytes | None) -> None:
        if answer is None:
            self.refuse("no answer to this question here", retry=True)
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


class Reception:
    """One listening port. Guests for a world that is not open yet wait; peers may start in any order.

    Attributes:
        secrets: who knows one of these is let in. To be replaced whole; who is in stays in.
    """

    def __init__(self, watchdog: WatchDog, sock: socket.socket, secrets: Sequence[bytes], pulse: Pulse) -> None:
        self.port: int = sock.getsockname()[1]
        self.secrets = secrets
        self.on_question: QuestionHandler | None = None
        self._watchdog = watchdog
        self._sock = sock
        self._pulse = pulse
        self._rosters: dict[str, Roster] = {}
        self._line_hosts: dict[tuple[str, int], LineHost] = {}
        self._guests: dict[Guest, None] = {}  # who has proven itself, oldest first
        self._strangers: dict[Guest, None] = {}  # oldest first
        self._beat_timer: Timer | None = None

    def open(self) -> None:
        self._listen()
        self._beat_timer = self._watchdog.call_later(self._pulse.interval_s, self._beat)

    def close(self) -> None:
        """Stop listening and show the waiting guests out. Worlds that have started are not touched."""
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        self._watchdog.unregister(self._sock)
        self._sock.close()
        for guest in [*self._guests, *self._strangers]:
            guest.show_out()

    def host(self, roster: Roster) -> None:
        """Seat guests in this world from now on; who waited for it already is seated at once."""
        self._rosters[roster.seat.world] = roster
        roster.start_when_full()
        for guest in reversed(list(self._guests)):  # of two for one seat the elder may be dead already
            if guest.hello is not None and guest.hello.question is None and guest.hello.world == roster.seat.world:
                self.seat(guest)

    def unhost(self, roster: Roster) -> None:
        """Free the name: the next world of this name is another one."""
        if self._rosters.get(roster.seat.world) is roster:
            del self._rosters[roster.seat.world]

    def seat(self, guest: Guest) -> None:
        hello = guest.hello
        assert hello is not None
        roster = self._rosters.get(hello.world)
        if roster is None or hello.epoch > roster.seat.epoch or (roster.started and not hello.epoch):
            return  # waits for an incarnation that is not open yet
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
        """Let the lines of this world in from now on."""
        self._line_hosts[host.world, host.epoch] = host

    def expect_no_more(self, host: LineHost) -> None:
        if self._line_hosts.get((host.world, host.epoch)) is host:
            del self._line_hosts[host.world, host.epoch]

    def connect(self, guest: Guest) -> None:
        """Give the connection of this guest to the member that it wants."""
        hello = guest.hello
        assert hello is not None
        host = self._line_hosts.get((hello.world, hello.epoch))
        reason = f"epoch {hello.epoch} of {hello.world!r} does not form here" if host is None else host.refusal(hello)
        if host is None or reason is not None:
            guest.refuse(reason or "", retry=False)
            return
        guest.welcome()
        sock = guest.lifeline.hand_over()
        self.forget(guest)
        host.admit(hello.rank, sock)

    def question(self, guest: Guest, text: str) -> None:
        if self.on_question is None:
            guest.reply(None)
            return
        self.on_question(text, guest.lifeline.peer_host, lambda answer: self._watchdog.call_soon(guest.reply, answer))

    def recognise(self, guest: Guest) -> None:
        """The guest has proven that it knows the secret."""
        del self._strangers[guest]
        self._guests[guest] = None

    def forget(self, guest: Guest) -> None:
        self._guests.pop(guest, None)
        self._strangers.pop(guest, None)

    def _listen(self) -> None:
        if self._sock.fileno() >= 0:
            self._watchdog.register(self._sock, selectors.EVENT_READ, self._on_readable)

    def _on_readable(self, _mask: int) -> None:
        for _ in range(_ACCEPTS_A_ROUND):
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:  # EMFILE and the like: the guest stays in the backlog
                logger.warning("cannot accept connections on port %d for now: %s", self.port, error)
                self._watchdog.unregister(self._sock)
                self._watchdog.call_later(_ACCEPT_PAUSE_S, self._listen)
                return
            if len(self._guests) >= _MAX_GUESTS:
                sock.close()
                continue
            try:
                self._strangers[Guest(self, self._watchdog, sock, self.secrets)] = None
            except OSError:  # gone before we could greet it
                sock.close()
            if len(self._strangers) > _MAX_STRANGERS:
                next(iter(self._strangers)).show_out()

    def _beat(self) -> None:
        """Guests that wait are kept alive, and let go when they fall silent."""
        self._beat_timer = self._watchdog.call_later(self._pulse.interval_s, self._beat)
        for guest in list(self._guests):
            if guest.hello is None or guest.hello.question is not None:
                continue
            if self._watchdog.now_s - guest.lifeline.last_heard_s > self._pulse.timeout_s:
                logger.debug("a guest from %s fell silent: %s", guest.lifeline.peer_host, Cause.HANG)
                guest.show_out()
            else:
                guest.lifeline.send(HEARTBEAT_BYTES)
