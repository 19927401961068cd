"""Connects the members of a forming world to each other: each connects to all lower ranks and accepts all higher ranks.

Members on one host connect through the Unix socket of the process (local_socket.py), the others by TCP.
Rank 0 accepts on the port of its control connections. Every other member except the last opens a port for this, publishes it in the
world's store, and closes it when all are connected. The handshake is the same as on a control connection and covers the world, the
generation and both ranks.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from multiworld.control.frames import MAX_HANDSHAKE_BYTES, Frame, FrameError, FrameReader, Kind
from multiworld.control.handshake import ClientHandshake, Hello
from multiworld.control.loop import ControlLoop
from multiworld.control.sockets import close_in_child
from multiworld.errors import JoinError
from multiworld.membership.acceptor import Acceptor, bind
from multiworld.membership.monitor import HeartbeatConfig
from multiworld.membership.store import ControlStore
from multiworld.texts import shown

logger = logging.getLogger(__name__)

_ATTEMPT_S = 5.0
"""Timeout of each socket operation while connecting to a member."""
_PAUSE_S = 0.1


class MeshConnector:
    """Connects one member to all others. `connect_all` blocks its thread; `close` wakes it.

    The acceptor calls `rejection` and `admit` on the control loop's thread.

    Attributes:
        formation: see `Hello`; connections with another one are refused. Set it before `connect_all`.

    Args:
        member: our own world, rank, size and generation.
        bind_host: the local address of the connections that we open; empty lets the kernel choose.
        local_acceptor: accepts the members on this host on a Unix socket; None for TCP only.
    """

    def __init__(
        self,
        control_loop: ControlLoop,
        member: Hello,
        secret: bytes,
        heartbeat: HeartbeatConfig,
        bind_host: str = "",
        local_acceptor: Acceptor | None = None,
    ) -> None:
        self.world = member.world
        self.generation = member.generation
        self.formation = member.formation
        self._control_loop = control_loop
        self._member = member
        self._secret = secret
        self._heartbeat = heartbeat
        self._bind_host = bind_host
        self._local_acceptor = local_acceptor
        self._changed = threading.Condition()
        self._socks: dict[int, socket.socket] = {}
        self._connecting: socket.socket | None = None
        self._closed = False
        self._unregister: Callable[[], None] = lambda: None

    # -- accepting (on the control loop's thread) --------------------------------------------------------------------------

    def accept_on(self, acceptor: Acceptor) -> None:
        """Accept data connections on the port of `acceptor`, and on the Unix socket, from now on."""
        acceptor.add_target(self)
        self._unregister = lambda: acceptor.remove_target(self)
        if self._local_acceptor is not None:
            self._local_acceptor.add_target(self)

    def rejection(self, hello: Hello) -> str | None:
        """Return the reason to refuse this connection; None to accept it."""
        if hello.size != self._member.size or not self._member.rank < hello.rank < hello.size:
            return (
                f"rank {hello.rank} of {hello.size} must not connect to rank {self._member.rank} of {self._member.size}"
            )
        if hello.peer != self._member.rank:
            return f"this is rank {self._member.rank}, not {hello.peer}"
        if not self.formation or hello.formation != self.formation:
            return "this member does not form that world any more, or not yet"
        return "this member accepts no more connections" if self._closed else None

    def admit(self, rank: int, sock: socket.socket) -> None:
        """Keep the connection to `rank`. A second connection replaces the first, which the same peer has abandoned (see `rejection`)."""
        with self._changed:
            former = self._socks.get(rank)
            if self._closed:
                former = sock
            else:
                self._socks[rank] = sock
            self._changed.notify_all()
        if former is not None:
            former.close()

    # -- connecting ----------------------------------------------------------------------------------------------------------

    def connect_all(self, store: ControlStore, local_host: str, host: tuple[str, int], timeout_s: float) -> None:
        """Connect to all lower ranks and wait for the connections of all higher ranks. Blocks.

        Args:
            local_host: our address as the others reach it.
            host: where rank 0 listens.
        Raises:
            JoinError: a member refused us, could not be reached or did not connect within `timeout_s`; or `close` was called.
            DistStoreError: a member did not publish its port.
        """
        until_s = time.monotonic() + timeout_s
        if 0 < self._member.rank < self._member.size - 1:
            port = self._open_port(local_host)
            store.set(_key(self._member.rank), f"{port} {local_host}")
        local = self._local_acceptor
        if self._member.rank < self._member.size - 1:
            store.set(_local_key(self._member.rank), "" if local is None else local.address)
        for rank in range(self._member.rank):
            path = "" if local is None else os.fsdecode(store.get(_local_key(rank)))
            sock = self._connect_locally(rank, path) if path else None
            if sock is None:
                address = host if rank == 0 else _address(store.get(_key(rank)))
                sock = self._connect_with_retries(rank, address, until_s)
            self.admit(rank, sock)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._socks) == self._member.size - 1, timeout_s)
            self._raise_if_closed()
            missing = {*range(self._member.size)} - {self._member.rank, *self._socks}
        self._control_loop.call_soon(self._stop_accepting)
        if missing:
            raise JoinError(self.world, f"ranks {', '.join(map(str, sorted(missing)))} did not connect to us")

    def take(self) -> dict[int, socket.socket]:
        """Return the connections by rank; the caller owns them. Later connections are refused."""
        with self._changed:
            socks, self._socks, self._closed = self._socks, {}, True
        return socks

    def close(self) -> None:
        """Wake `connect_all` and close the connections that were not taken. Idempotent, callable from any thread."""
        for sock in self.take().values():
            sock.close()
        with self._changed:
            self._changed.notify_all()
            if self._connecting is not None:
                with contextlib.suppress(OSError):
                    self._connecting.shutdown(socket.SHUT_RDWR)
        self._control_loop.call_soon(self._stop_accepting)

    def _open_port(self, host: str) -> int:
        acceptor = Acceptor(self._control_loop, bind(host, 0), [self._secret], self._heartbeat)

        def start() -> None:
            acceptor.open()
            self.accept_on(acceptor)
            self._unregister = acceptor.close
            if self._closed:
                self._stop_accepting()

        self._control_loop.call_soon(start)
        return acceptor.port

    def _stop_accepting(self) -> None:
        unregister, self._unregister = self._unregister, lambda: None
        unregister()
        if self._local_acceptor is not None:
            self._local_acceptor.remove_target(self)

    def _connect_locally(self, rank: int, path: str) -> socket.socket | None:
        """Connect to a member by its Unix socket. Returns None if it is not on this host, or in a container that does not share the socket.

        Only processes under the same kernel can connect so.
        """
        try:
            return self._connect(rank, path)
        except (OSError, FrameError, ValueError) as error:  # ValueError: the path cannot be that of a socket
            logger.debug("world=%s: rank %d is not reached by its Unix socket: %s", self.world, rank, error)
            return None

    def _connect_with_retries(self, rank: int, address: tuple[str, int], until_s: float) -> socket.socket:
        while True:
            try:
                return self._connect(rank, address)
            except PermissionError as error:
                raise JoinError(self.world, f"rank {rank} at {address[0]}:{address[1]}: {error}") from None
            except (OSError, FrameError) as error:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _PAUSE_S)
                    self._raise_if_closed()
                if time.monotonic() > until_s:
                    detail = f"rank {rank} cannot be reached at {address[0]}:{address[1]}: {error}"
                    raise JoinError(self.world, detail) from error

    def _connect(self, rank: int, address: tuple[str, int] | str) -> socket.socket:
        """Connect to `address`, a str for a Unix socket, and authenticate."""
        handshake = ClientHandshake(self._secret, replace(self._member, peer=rank, formation=self.formation))
        local = isinstance(address, str)
        family = socket.AF_UNIX if local else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = close_in_child(socket.socket(family, socket.SOCK_STREAM))
        try:
            with self._interruptible(sock):
                sock.settimeout(_ATTEMPT_S)
                if not local:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    if self._bind_host:
                        sock.bind((self._bind_host, 0))
                sock.connect(address)
                sock.sendall(handshake.hello(_next_frame(sock)).encode())
                answer = _next_frame(sock)
            if answer.kind is Kind.REFUSE and answer.fields:
                raise PermissionError(f"it refused us: {shown(answer.fields[0].decode(errors='replace'))}")
            handshake.check_welcome(answer)
        except BaseException:
            sock.close()
            raise
        return sock

    @contextlib.contextmanager
    def _interruptible(self, sock: socket.socket) -> Iterator[None]:
        with self._changed:
            self._raise_if_closed()
            self._connecting = sock
        try:
            yield
        finally:
            with self._changed:
                self._connecting = None

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise JoinError(self.world, "the world ended while its members connected")


def _key(rank: int) -> str:
    return f"multiworld/address/{rank}"


def _local_key(rank: int) -> str:
    return f"multiworld/local/{rank}"


def _address(value: bytes) -> tuple[str, int]:
    port, _, host = value.decode(errors="replace").partition(" ")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise FrameError(f"not an address: {value[:60]!r}")
    return host, int(port)


def _next_frame(sock: socket.socket) -> Frame:
    """Return the next frame that is not a heartbeat. Raises FrameError.

    Reads nothing beyond the frame, because the following bytes may belong to a data transfer.
    """
    frames = FrameReader(MAX_HANDSHAKE_BYTES)
    while True:
        data = sock.recv(frames.missing_bytes)
        if not data:
            raise FrameError("the connection ended")
        for frame in frames.feed(data):
            if frame.kind is not Kind.HEARTBEAT:
                return frame
