"""The listening ports of one process. Each port accepts members for the worlds hosted there, and queries."""

import asyncio
import logging
import socket
from collections.abc import Callable

from multiworld.control.dial import resolve
from multiworld.control.loop import ControlLoop
from multiworld.errors import JoinError
from multiworld.membership.acceptor import Acceptor, bind
from multiworld.membership.local_socket import bind_local
from multiworld.world import World

logger = logging.getLogger(__name__)


class ListenerRegistry:
    """All listeners of a manager, by address and port. Not thread-safe: `WorldManager` guards it with its lock.

    Args:
        secret: the secret that clients must know.
    """

    def __init__(self, secret: bytes) -> None:
        self._secrets = [secret]  # shared with all acceptors
        self._local: Acceptor | None = None
        self._local_failed = False
        self._listeners: dict[tuple[str, int], Acceptor] = {}

    def at(self, addr: str, port: int) -> Acceptor:
        """Return the open listener at this address. Raises KeyError."""
        return self._listeners[listening_host(addr), port]

    def open(
        self, host: str, port: int, running_loop: Callable[[], ControlLoop], sock: socket.socket | None = None
    ) -> Acceptor:
        """Return the listener on `host`:`port`; open it if necessary.

        Args:
            host: a result of `listening_host`.
            port: 0 lets the kernel choose.
            sock: a socket that listens there already; None opens one.
            running_loop: returns the control loop for a new listener. Called after the port is bound.
        Raises:
            OSError: this process cannot listen there.
        """
        listener = self._listeners.get((host, port))
        if listener is None:
            sock = sock or bind(host, port)
            try:
                control_loop = running_loop()
            except BaseException:
                sock.close()
                raise
            listener = Acceptor(control_loop, sock, self._secrets)
            control_loop.call_soon(listener.open)
            self._listeners[host, listener.port] = listener
        return listener

    def open_local(self, folder: str, control_loop: ControlLoop) -> Acceptor | None:
        """Return the acceptor of members on this host, on a Unix socket in `folder`; open it if necessary. None if that failed once."""
        if self._local is None and not self._local_failed:
            try:
                sock = bind_local(folder)
            except OSError as error:
                self._local_failed = True
                logger.warning("members on this host are connected by TCP: no Unix socket in %s: %s", folder, error)
                return None
            self._local = Acceptor(control_loop, sock, self._secrets)
            control_loop.call_soon(self._local.open)
        return self._local

    def set_accepted_secrets(self, secrets: tuple[bytes, ...]) -> None:
        """Accept only clients that know one of these secrets from now on, on all ports. Existing connections stay open."""
        self._secrets[:] = secrets

    def remove_world(self, world: World) -> None:
        """Remove an ended world from its listener."""
        for listener in self._listeners.values():
            listener.worlds.discard(world)

    def close_idle(self) -> None:
        """Close the listeners that have no world and no `keep_open`. Runs on the control loop's thread."""
        for key in [key for key, listener in self._listeners.items() if not listener.worlds and not listener.keep_open]:
            self._listeners.pop(key).close()

    def detach_all(self) -> list[Acceptor]:
        """Remove and return all listeners. They are still open; the caller must close them."""
        listeners, self._listeners = list(self._listeners.values()), {}
        if self._local is not None:
            listeners.append(self._local)
            self._local = None
        return listeners


def listening_host(addr: str) -> str:
    """Return the address to bind for `addr`. An IP address is returned as it is; a name is resolved, which may block. Raises OSError."""
    return str(socket.getaddrinfo(addr, None, type=socket.SOCK_STREAM)[0][4][0])


async def resolved_host(world_name: str, addr: str, timeout_s: float) -> str:
    """Like `listening_host`, without blocking the event loop. Raises OSError, and JoinError after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            return (await resolve(addr))[0]
    except TimeoutError:
        raise JoinError(world_name, f"{addr} was not resolved within {timeout_s:g} s") from None
