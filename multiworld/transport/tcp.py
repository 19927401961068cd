"""What the kernel does and knows about a TCP connection. Unix sockets need none of it."""

import contextlib
import socket

MAX_RETRANSMISSIONS = 5
"""After so many retransmissions without an acknowledgement, about 7 s in a local network, the network or the host of the peer counts as
lost."""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Seconds without traffic until the kernel probes the peer, seconds between probes, and probes until the connection is lost."""
_LOCAL_BUFFER_BYTES = 1 << 19
"""Size in bytes of the send buffer between two members on one host, which Linux doubles. The data in flight stays in the caches of the
processor then: 1 MiB takes 0.18 ms instead of 0.4, and an all-reduce of 64 MiB between four members 0.8 times as long. Between hosts, Linux
adapts the size to the latency."""
_RETRANSMISSIONS_AT = 2
"""Offset in `tcp_info` of the kernel: how often in a row the kernel has sent data again without an acknowledgement."""


def prepare(sock: socket.socket) -> None:
    """Set the options of a connection. The kernel probes one without traffic, because a firewall may forget it."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    with contextlib.suppress(OSError):  # the connection was closed meanwhile
        if sock.getsockname()[0] == sock.getpeername()[0]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER_BYTES)


def is_unacknowledged(sock: socket.socket) -> bool:
    """Return whether the host of the peer has not acknowledged `MAX_RETRANSMISSIONS` of sent data.

    Not TCP_USER_TIMEOUT, which would also end the connection to a healthy peer that reads slowly.
    """
    if sock.family == socket.AF_UNIX:
        return False
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RETRANSMISSIONS_AT + 1)
    except OSError:  # the connection was closed meanwhile
        return False
    return info[_RETRANSMISSIONS_AT] >= MAX_RETRANSMISSIONS
