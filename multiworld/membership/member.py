"""The monitor of every rank except 0: connects to rank 0, joins there, and monitors rank 0. See monitor.py."""

import errno
import os
import selectors
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from multiworld.control.connection import ControlConnection
from multiworld.control.frames import Frame, FrameError, Kind
from multiworld.control.handshake import ClientHandshake, Hello
from multiworld.control.loop import ControlLoop, Timer
from multiworld.control.sockets import close_in_child
from multiworld.errors import Cause
from multiworld.membership.monitor import HeartbeatConfig, MembershipMonitor, MonitoredWorld, number
from multiworld.texts import shown

_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Pauses between attempts to connect to rank 0, which may not have started yet. The last one repeats."""
_CONNECT_S = 1.0
"""Lower limit of the timeout of one attempt, which is the heartbeat timeout, at most `_MAX_CONNECT_S`."""
_MAX_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address as `socket.getaddrinfo` returns it."""

    family: socket.AddressFamily
    sockaddr: tuple[str, int]


class MemberSession(MembershipMonitor):
    """The monitor of a rank other than 0. Its only control connection, to rank 0, is `connections[0]`.

    Until START it reconnects after a failure, trying `addresses` in turn. After START a lost connection breaks the world.
    """

    def __init__(
        self,
        control_loop: ControlLoop,
        world: MonitoredWorld,
        member: Hello,
        heartbeat: HeartbeatConfig,
        secret: bytes,
        addresses: Sequence[Address],
        bind_host: str = "",
    ) -> None:
        super().__init__(control_loop, world, member, heartbeat)
        self._addresses = addresses
        self._bind_host = bind_host
        self._secret = secret
        self._attempt = 0
        self._connecting: socket.socket | None = None
        self._retry_timer: Timer | None = None
        self._connect()

    def close(self) -> None:
        super().close()
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._close_connecting()

    # -- connecting to rank 0 ------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._closed:
            return
        self._handshake = ClientHandshake(self._secret, self.member)
        self._welcomed = False
        address = self._addresses[self._attempt % len(self._addresses)]
        try:
            self._connecting = sock = close_in_child(socket.socket(address.family, socket.SOCK_STREAM))
            sock.setblocking(False)
            if self._bind_host:
                sock.bind((self._bind_host, 0))
            result = sock.connect_ex(address.sockaddr)
        except OSError as error:  # no free file descriptor, or `bind_host` is not an address of this machine
            self._retry(error.strerror or str(error))
            return
        if result in (0, errno.EINPROGRESS):
            self._control_loop.register(sock, selectors.EVENT_WRITE, self._on_connected)
            timeout_s = min(max(self._heartbeat.timeout_s, _CONNECT_S), _MAX_CONNECT_S)
            self._retry_timer = self._control_loop.call_later(timeout_s, self._retry, "no answer")
        else:
            self._retry(os.strerror(result))

    def _on_connected(self, _mask: int) -> None:
        sock = self._connecting
        assert sock is not None
        if failure := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._retry(os.strerror(failure))
            return
        self._control_loop.unregister(sock)
        try:
            # TCP simultaneous open: on loopback, a client that retries a free ephemeral port can connect to itself.
            if sock.getsockname() == sock.getpeername():
                self._retry("no process listens there")
                return
            self.connections[0] = ControlConnection(self._control_loop, sock, self)
        except OSError as error:  # the peer has reset the connection already
            self._retry(error.strerror or str(error))
            return
        self._connecting = None
        if self._retry_timer is not None:
            self._retry_timer.cancel()

    def _retry(self, reason: str) -> None:
        self._world.on_join_failed(reason, final=False)
        self._close_connecting()
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        pause_s = _RETRY_S[min(self._attempt, len(_RETRY_S) - 1)]
        self._attempt += 1
        self._retry_timer = self._control_loop.call_later(pause_s, self._connect)

    def _close_connecting(self) -> None:
        if self._connecting is not None:
            self._control_loop.unregister(self._connecting)
            self._connecting.close()
            self._connecting = None

    # -- connected -----------------------------------------------------------------------------------------------------------

    def on_frame(self, connection: ControlConnection, frame: Frame) -> None:
        match frame.kind, frame.fields:
            case Kind.REFUSE, (reason, retry) if not self.started:
                self._refused(shown(reason.decode(errors="replace")), final=retry != b"1")
            case _ if not self._welcomed:
                self._on_handshake_frame(connection, frame)
            case Kind.START, (generation,) if not self.started:
                self.started = True
                self.member = replace(self.member, generation=number(generation))
                self._world.on_all_joined(self.member.generation, connection.local_host)
            case _ if self.started:
                self._on_common_frame(connection, frame)
            case Kind.HEARTBEAT, _:
                pass
            case _:
                raise FrameError(f"unexpected {frame.kind.name} before the start")

    def _on_handshake_frame(self, connection: ControlConnection, frame: Frame) -> None:
        """Handle a frame received before rank 0 has proven that it knows the secret. Raises FrameError for an unexpected kind."""
        match frame.kind:
            case Kind.CHALLENGE:
                connection.send(self._handshake.hello(frame).encode())
            case Kind.WELCOME:
                try:
                    self._handshake.check_welcome(frame)
                except PermissionError as error:
                    self._refused(str(error), final=True)
                    return
                self._welcomed = True
                connection.mark_authenticated()
                awaited = f"generation {self.member.generation}" if self.member.generation else "the world"
                self._world.on_join_failed(f"rank 0 answered, but {awaited} did not start there", final=False)
            case _:
                raise FrameError(f"unexpected {frame.kind.name} before the welcome")

    def _refused(self, reason: str, *, final: bool) -> None:
        if final:
            self._world.on_join_failed(reason, final=True)
            self.close()
        else:
            self.connections.pop(0).close()
            self._retry(reason)

    def _on_connection_lost(self, rank: int, cause: Cause, detail: str) -> None:
        self.connections.pop(rank, None)
        if not self.started:
            self._retry(f"the connection to rank 0 was lost: {detail}")
        elif not self._member_left:
            self._world.on_member_failed(rank, cause, detail)
