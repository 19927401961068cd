"""Opens the listening sockets of the HTTP ports. Imports neither uvicorn nor torch, because the supervisor uses it too."""

import socket

from multiworld_serving.common.config import UserError

BACKLOG = 2048


def bind(host: str, port: int, option: str, host_option: str = "--host") -> socket.socket:
    """A listening socket. Raises UserError, which names the options of port and host, if the port is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}; stop the program that uses it, or choose another "
            f"{option} (0 selects a free port) or {host_option}"
        ) from error
    sock.setblocking(False)
    return sock
