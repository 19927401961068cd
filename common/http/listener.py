"""Opens the listening sockets of the HTTP ports. Imports neither uvicorn nor torch, because the supervisor uses it too."""

import asyncio
import contextlib
import errno
import select
import socket
import sys

from multiworld_serving.common.config.errors import UserError

BACKLOG = 2048
_REFUSE_POLLS = 50
_POLL_S = 0.01
_UNREAD_S = 60
"""The system ends a connection whose client has read nothing for this time although it has a response, or cannot be reached."""


def bind(host: str, port: int, option: str, host_option: str = "--host", *, reserve: bool = False) -> socket.socket:
    """A listening socket.

    Args:
        reserve: do not listen, but keep the port for listeners of this user that share it (SO_REUSEPORT).
    Raises:
        UserError: the port is not available; the message names the options of port and host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if sys.platform == "linux":  # accepted connections inherit it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_S * 1000)
    try:
        sock.bind((host, port))
        if reserve:
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEPORT, 1
            )  # after bind(), which a port that others share would not refuse
        else:
            sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        advice = f"stop the program that uses it, or choose another {option} (0 selects a free port) or {host_option}"
        if error.errno == errno.EADDRNOTAVAIL:
            advice = f"no interface of this machine has this address: choose another {host_option}"
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; {advice}") from error
    sock.setblocking(False)
    return sock


async def stop_listening(sock: socket.socket) -> None:
    """Have the kernel refuse new connections in all processes that share this socket. Otherwise clients wait and are reset.

    Waits at most half a second until a process has taken the connections in the socket's backlog.
    """
    waiting = select.poll()
    waiting.register(sock, select.POLLIN)
    for _ in range(_REFUSE_POLLS):
        if not waiting.poll(0):
            break
        await asyncio.sleep(_POLL_S)
    with contextlib.suppress(OSError):  # it does not listen any more
        sock.shutdown(socket.SHUT_RDWR)
