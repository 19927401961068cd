"""Registers the sockets of this library, so that a forked child closes its copies.

A connection closes only when every process that holds it has closed it. If a child kept copies and its parent died, the other members
would see missed heartbeats instead of a closed connection.
"""

import os
import socket
import weakref

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_child(sock: socket.socket) -> socket.socket:
    """Close the copy of `sock` in every forked child. Returns `sock`."""
    _open.add(sock)
    return sock


def _close_copies() -> None:
    for sock in list(_open):
        sock.close()  # no shutdown: the parent still uses the connection


os.register_at_fork(after_in_child=_close_copies)
