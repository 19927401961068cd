"""A dial connects and authenticates, or says why not and whether another attempt may succeed."""

import asyncio
import socket

import pytest

from multiworld.control.dial import dial, reason_of
from multiworld.control.frames import HEARTBEAT_BYTES, Address, FrameReader
from multiworld.control.handshake import Hello, ServerHandshake
from multiworld.membership.acceptor import listen_on

PATIENCE_S = 30.0


async def connect(address: tuple[str, int] | str, timeout_s: float = PATIENCE_S) -> socket.socket:
    return await dial(address, b"secret", lambda host: Hello("w", 1, 2, address=Address(host)), timeout_s)


def accept(listener: socket.socket) -> tuple[socket.socket, ServerHandshake, Hello]:
    """The side of the server, up to our welcome."""
    listener.setblocking(True)
    sock, _ = listener.accept()
    sock.settimeout(PATIENCE_S)
    handshake, frames = ServerHandshake(b"secret"), FrameReader()
    sock.sendall(HEARTBEAT_BYTES + handshake.challenge().encode())
    while not (come := list(frames.feed(sock.recv(1 << 12)))):
        pass
    return sock, handshake, handshake.accept(come[0])


async def test_data_after_the_handshake_is_left_to_the_owner_of_the_socket() -> None:
    """A server may write to the connection right after it has accepted the client."""
    with listen_on(("127.0.0.1", 0)) as listener:
        dialing = asyncio.create_task(connect(listener.getsockname()))
        theirs, handshake, hello = await asyncio.to_thread(accept, listener)
        assert hello.address.host == "127.0.0.1"
        theirs.sendall(handshake.welcome().encode() + b"data")
        with await dialing as ours, theirs:
            ours.settimeout(PATIENCE_S)
            assert ours.recv(1 << 12) == b"data"


async def test_a_server_that_says_nothing_is_given_up_after_the_timeout() -> None:
    with listen_on(("127.0.0.1", 0)) as listener, pytest.raises(OSError) as ending:  # noqa: PT011 - its text is checked below
        await connect(listener.getsockname(), 0.1)
    assert reason_of(ending.value) == "no answer"


@pytest.mark.parametrize("path", ["/nonexistent/socket", "a\0b", "/" + 200 * "x"])
async def test_a_path_that_cannot_be_reached_is_a_failure_that_is_not_final(path: str) -> None:
    with pytest.raises((OSError, ValueError)) as ending:
        await connect(path)
    assert reason_of(ending.value)
