"""The monitor of every rank except 0: connects to rank 0, authenticates, joins, and monitors rank 0. See monitor.py."""

import errno
import os
import selectors
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from multiworld.control.connection import ControlConnection
from multiworld.control.frames import Frame, FrameError, Kind
from multiworld.control.handshake import ClientHandshake, Hello
from multiworld.control.loop import Timer, WatchDog
from multiworld.control.sockets import not_inherited
from multiworld.errors import Cause
from multiworld.membership.monitor import HeartbeatConfig, MembershipMonitor, MonitoredWorld, number
from multiworld.texts import shown

_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Pauses between attempts to connect to rank 0, which may not have started yet. The last one repeats."""
_CONNECT_S = 1.0
"""Lower limit of the timeout of one attempt. The timeout is the heartbeat timeout, between this and `_MAX_CONNECT_S`."""
_MAX_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address as `socket.getaddrinfo` returns it."""

    family: socket.AddressFamily
    sockaddr: tuple[str, int]


class MemberSession(MembershipMonitor):
    """The monitor of a rank other than 0. Its only control connection, to rank 0, is `lifelines[0]`.

    Until START it reconnects after a failure, trying `addresses` in turn. After START a lost connection breaks the world.
    """

    def __init__(
        self,
        watchdog: WatchDog,
        world: MonitoredWorld,
        seat: Hello,
        pulse: HeartbeatConfig,
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
        self._handshake = ClientHandshake(secret, seat)
        self._reach()

    def settle(self) -> None:
        self._tell(Frame(Kind.DRAINED).encode())

    def detach(self) -> None:
        super().detach()
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._drop_connecting()

    # -- connecting to rank 0 ------------------------------------------------------------------------------------------------

    def _reach(self) -> None:
        if self._detached:
            return
        self._handshake = ClientHandshake(self._secret, self.seat)
        self._welcome = False
        address = self._addresses[self._attempt % len(self._addresses)]
        try:
            self._connecting = sock = not_inherited(socket.socket(address.family, socket.SOCK_STREAM))
            sock.setblocking(False)
            if self._bind_host:
                sock.bind((self._bind_host, 0))
            result = sock.connect_ex(address.sockaddr)
        except (
            OSError
        ) as error:  # for example no free file descriptor, or `bind_host` is not an address of this machine
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
            self.lifelines[0] = ControlConnection(self._watchdog, sock, self)
        except OSError as error:  # the peer has reset the connection already
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

    # -- connected -----------------------------------------------------------------------------------------------------------

    def on_frame(self, lifeline: ControlConnection, frame: Frame) -> None:
        match frame.kind, frame.fields:
            case Kind.REFUSE, (reason, retry) if not self.started:
                self._refused(shown(reason.decode(errors="replace")), final=retry != b"1")
            case _ if not self._welcome:
                self._shake_hands(lifeline, frame)
            case Kind.START, (epoch,) if not self.started:
                self.started = True
                self.seat = replace(self.seat, epoch=number(epoch))
                self._world.on_all_here(self.seat.epoch, lifeline.local_host)
            case Kind.CLOSE_ACK, ():
                self._world.on_all_settled()
            case _ if self.started:
                self._hear(lifeline, frame)
            case Kind.HEARTBEAT, _:
                pass
            case _:
                raise FrameError(f"unexpected {frame.kind.name} before the start")

    def _shake_hands(self, lifeline: ControlConnection, frame: Frame) -> None:
        """Handle a frame received before rank 0 has proven that it knows the secret. Raises FrameError for any other kind."""
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
    """Whether this is a TCP simultaneous open: on loopback, a client that retries a free ephemeral port can connect to itself."""
    return bool(sock.getsockname() == sock.getpeername())
