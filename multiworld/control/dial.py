"""The client side of a connection: connect to another process, authenticate, and hand the connection over."""

import errno
import os
import selectors
import socket
from collections.abc import Callable

from multiworld.control.connection import ControlConnection
from multiworld.control.frames import Frame, FrameError, Kind
from multiworld.control.handshake import ClientHandshake, Hello
from multiworld.control.loop import ControlLoop
from multiworld.control.sockets import close_in_child
from multiworld.texts import shown


class Dial:
    """One attempt to connect and to authenticate. Runs on the control loop's thread.

    Calls `on_welcome` or `on_failed` once, unless it is cancelled; `on_failed` may be called by the constructor.

    Args:
        address: an IP address and a port, or the path of a Unix socket.
        make_hello: returns our request. Called with the local address of the connection; may raise OSError.
        on_welcome: gets the connection, and must replace its owner or release its socket.
        on_failed: gets the reason, and whether another attempt cannot succeed.
        timeout_s: seconds to connect, and then seconds without data from the other process.
    """

    def __init__(
        self,
        control_loop: ControlLoop,
        address: tuple[str, int] | str,
        secret: bytes,
        make_hello: Callable[[str], Hello],
        on_welcome: Callable[[ControlConnection], object],
        on_failed: Callable[[str, bool], object],
        timeout_s: float,
        bind_host: str = "",
    ) -> None:
        self._control_loop = control_loop
        self._secret = secret
        self._make_hello = make_hello
        self._on_welcome = on_welcome
        self._on_failed = on_failed
        self._timeout_s = timeout_s
        self._sock: socket.socket | None = None
        self._connection: ControlConnection | None = None
        self._timer = control_loop.call_later(timeout_s, self._fail, "no answer")
        try:
            self._connect(address, bind_host)
        except (
            OSError,
            ValueError,
        ) as error:  # no free descriptor, `bind_host` is not of this machine; an invalid path
            self._fail(getattr(error, "strerror", None) or str(error))

    def cancel(self) -> None:
        """Close the connection, unless it is handed over. No callback follows."""
        self._timer.cancel()
        if self._connection is not None:
            self._connection.close()
        elif self._sock is not None:
            self._control_loop.unregister(self._sock)
            self._sock.close()
        self._connection = self._sock = None

    def _connect(self, address: tuple[str, int] | str, bind_host: str) -> None:
        local = isinstance(address, str)
        family = socket.AF_UNIX if local else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._sock = sock = close_in_child(socket.socket(family, socket.SOCK_STREAM))
        sock.setblocking(False)
        if bind_host and not local:
            sock.bind((bind_host, 0))
        result = sock.connect_ex(address)
        if result not in (0, errno.EINPROGRESS):
            raise OSError(result, os.strerror(result))
        self._control_loop.register(sock, selectors.EVENT_WRITE, self._on_connected)

    def _on_connected(self, _mask: int) -> None:
        sock = self._sock
        assert sock is not None
        self._control_loop.unregister(sock)
        try:
            if failure := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(failure, os.strerror(failure))
            # TCP simultaneous open: on loopback, a client that retries a free ephemeral port can connect to itself.
            if sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
                raise OSError("no process listens there")
            self._connection = connection = ControlConnection(self._control_loop, sock, self)
            self._handshake = ClientHandshake(self._secret, self._make_hello(connection.local_host))
        except OSError as error:  # for example, the peer has reset the connection already
            self._fail(error.strerror or str(error))
            return
        self._check_silence(connection)

    def _check_silence(self, connection: ControlConnection) -> None:
        self._timer.cancel()
        remaining_s = connection.last_received_s + self._timeout_s - self._control_loop.now_s
        if remaining_s < 0:
            self._fail("no answer")
        else:
            self._timer = self._control_loop.call_later(remaining_s, self._check_silence, connection)

    def on_frame(self, connection: ControlConnection, frame: Frame) -> None:
        match frame.kind, frame.fields:
            case Kind.CHALLENGE, _:
                connection.send(self._handshake.hello(frame).encode())
            case Kind.WELCOME, _:
                try:
                    self._handshake.check_welcome(frame)
                except PermissionError as error:
                    self._fail(str(error), final=True)
                    return
                self._timer.cancel()
                self._connection = self._sock = None
                self._on_welcome(connection)
            case Kind.REFUSE, (reason, retry):
                self._fail(shown(reason.decode(errors="replace")), final=retry != b"1")
            case Kind.HEARTBEAT, _:
                pass
            case _:
                raise FrameError(f"unexpected {frame.kind.name} before the welcome")

    def on_lost(self, _connection: ControlConnection, reason: str) -> None:
        self._fail(f"the connection was lost: {reason}")

    def _fail(self, reason: str, *, final: bool = False) -> None:
        self.cancel()
        self._on_failed(reason, final)
