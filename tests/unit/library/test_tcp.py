"""Tests for multiworld/transport/tcp.py."""

import contextlib
import socket
from pathlib import Path

import pytest

from multiworld.transport import tcp


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_only_the_send_buffer_of_a_member_on_the_same_host_is_limited(host: str) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((host, 0)))
        sock = stack.enter_context(socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0)))
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        tcp.prepare(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        allowed = int(Path("/proc/sys/net/core/wmem_max").read_text())
        limited = 2 * min(allowed, tcp._LOCAL_BUFFER_BYTES)  # Linux doubles it
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == (limited if host == "127.0.0.1" else before)


def test_a_connection_that_was_closed_meanwhile_is_no_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        server.accept()[0].close()
        sock.shutdown(socket.SHUT_RDWR)
        tcp.prepare(sock)
