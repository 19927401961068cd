"""Any rank but 0 of a world: it reaches rank 0, takes its seat, and holds on to the one lifeline. See rendezvous.py."""

import errno
import os
import selectors
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from multiworld.errors import Cause
from multiworld.frames import Frame, FrameError, Kind
from multiworld.handshake import GuestHandshake, Hello
from multiworld.lifeline import Lifeline
from multiworld.rendezvous import Pulse, Watch, WatchedWorld, number
from multiworld.watchdog import Timer, WatchDog

_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Pauses between attempts to reach rank 0, which may not have started yet; the last one repeats."""
_CONNECT_S = 1.0
"""How long one attempt may take to connect, at the least, before another is made."""
_MAX_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class Address:
    """A resolved TCP address: what `socket.getaddrinfo` gives."""

    family: socket.AddressFamily
    sockaddr: tuple[str, int]


class Membership(Watch):
    """Every other rank's watch: reaches rank 0, takes its seat, and holds on to the one lifeline."""

    def __init__(
        self,
        watchdog: WatchDog,
        world: WatchedWorld,
        seat: Hello,
        pulse: Pulse,
        secret: bytes,
        addresses: Sequence[Address],
        bind_host: str = "",
    ) -> None:
        super().__init__(watchdog, world, seat, pulse)
        self._addresses = addresses
        self._bind_host = bind_host
        self._secret = secret
        self._attempt = 0
        self._welcome = False
        self._connecting: socket.socket | None = None
        self._retry_timer: Timer | None = None
        self._handshake = GuestHandshake(secret, seat)
        self._reach()

    def settle(self) -> None:
        self._tell(Frame(Kind.SETTLED).encode())

    def detach(self) -> None:
        super().detach()
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._drop_connecting()

    # -- reaching rank 0 -----------------------------------------------------------------------------------------------------

    def _reach(self) -> None:
        if self._detached:
            return
        self._handshake = GuestHandshake(self._secret, self.seat)
        self._welcome = False
        address = self._addresses[self._attempt % len(self._addresses)]
        try:
            self._connecting = sock = socket.socket(address.family, socket.SOCK_STREAM)
            sock.setblocking(False)
            if self._bind_host:
                sock.bind((self._bind_host, 0))
            result = sock.connect_ex(address.sockaddr)
        except OSError as error:  # no descriptor left, say, or no such address here
            self._unreachable(error.strerror or str(error))
            return
        if result in (0, errno.EINPROGRESS):
            self._watchdog.register(sock, selectors.EVENT_WRITE, self._on_connected)
            patience_s = min(max(self._pulse.timeout_s, _CONNECT_S), _MAX_CONNECT_S)
            self._retry_timer = self._watchdog.call_later(patience_s, self._unreachable, "nobody answered")
        else:
            self._unreachable(os.strerror(result))

    def _on_connected(self, _mask: int) -> None:
        sock = self._connecting
        assert sock is not None
        if failure := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._unreachable(os.strerror(failure))
            return
        self._watchdog.unregister(sock)
        try:
            if _connected_to_itself(sock):
                self._unreachable("nobody listens there")
                return
            self.lifelines[0] = Lifeline(self._watchdog, sock, self)
        except OSError as error:  # reset in this moment
            self._unreachable(error.strerror or str(error))
            return
        self._connecting = None
        if self._retry_timer is not None:
            self._retry_timer.cancel()

    def _unreachable(self, reason: str) -> None:
        self._world.on_refused(reason, final=False)
        self._try_again()

    def _try_again(self) -> None:
        self._drop_connecting()
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        pause_s = _RETRY_S[min(self._attempt, len(_RETRY_S) - 1)]
        self._attempt += 1
        self._retry_timer = self._watchdog.call_later(pause_s, self._reach)

    def _drop_connecting(self) -> None:
        if self._connecting is not None:
            self._watchdog.unregister(self._connecting)
            self._connecting.close()
            self._connecting = None

    # -- seated --------------------------------------------------------------------------------------------------------------

    def on_frame(self, lifeline: Lifeline, frame: Frame) -> None:
        match frame.kind, frame.fields:
            case Kind.REFUSE, (reason, retry) if not self.started:
                self._refused(reason.decode(errors="replace"), final=retry != b"1")
            case _ if not self._welcome:
                self._shake_hands(lifeline, frame)
            case Kind.START, (epoch,) if not self.started:
                self.started = True
                self.seat = replace(self.seat, epoch=number(epoch))
                self._world.on_all_here(self.seat.epoch, lifeline.local_host)
            case Kind.DONE, ():
                self._world.on_all_settled()
            case _ if self.started:
                self._hear(lifeline, frame)
            case Kind.HEARTBEAT, _:
                pass
            case _:
                raise FrameError(f"unexpected {frame.kind.name} before the start")

    def _shake_hands(self, lifeline: Lifeline, frame: Frame) -> None:
        """Nothing else counts before the host has proven that it knows the secret."""
        match frame.kind:
            case Kind.CHALLENGE:
                lifeline.send(self._handshake.hello(frame).encode())
            case Kind.WELCOME:
                try:
                    self._handshake.check_welcome(frame)
                except PermissionError as error:
                    self._refused(str(error), final=True)
                    return
                self._welcome = True
                lifeline.trust()
                wanted = f"epoch {self.seat.epoch}" if self.seat.epoch else "the world"
                self._world.on_refused(f"rank 0 answered, but {wanted} did not start there", final=False)
            case _:
                raise FrameError(f"unexpected {frame.kind.name} before the welcome")

    def _refused(self, reason: str, *, final: bool) -> None:
        self._world.on_refused(reason, final=final)
        if final:
            self.detach()
        elif 0 in self.lifelines:
            self.lifelines.pop(0).close()
            self._try_again()

    def _lost(self, rank: int, cause: Cause, detail: str) -> None:
        self.lifelines.pop(rank, None)
        if not self.started:
            self._world.on_refused(f"the connection to rank 0 was lost: {detail}", final=False)
            self._try_again()
        elif self._over:
            self._world.on_all_settled()
        else:
            self._world.on_gone(rank, cause, detail)


def _connected_to_itself(sock: socket.socket) -> bool:
    """True for TCP's simultaneous open: on loopback, a client that retries a free ephemeral port can reach itself."""
    return bool(sock.getsockname() == sock.getpeername())
