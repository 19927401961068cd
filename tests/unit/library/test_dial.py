"""A dial connects, authenticates, and hands the connection over, or says why not and whether another attempt may succeed."""

import socket
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from multiworld.control.dial import Dial
from multiworld.control.frames import HEARTBEAT_BYTES, Frame, FrameError, FrameReader, Kind
from multiworld.control.handshake import Hello, ServerHandshake
from multiworld.control.loop import ControlLoop
from multiworld.membership.acceptor import bind
from multiworld.membership.roster import Address, Roster

PATIENCE_S = 30.0


@pytest.fixture
def control_loop() -> Iterator[ControlLoop]:
    loop = ControlLoop()
    loop.start()
    yield loop
    loop.stop()


def dial(control_loop: ControlLoop, address: tuple[str, int] | str, timeout_s: float = PATIENCE_S) -> SimpleQueue[Any]:
    """Start a dial. Returns a queue that gets its socket, or the reason of its failure and whether it is final."""
    outcome: SimpleQueue[Any] = SimpleQueue()

    def start() -> None:
        Dial(
            control_loop,
            address,
            b"secret",
            lambda host: Hello("w", 1, 2, host=host),
            lambda connection: outcome.put(connection.release_socket()),
            lambda reason, final: outcome.put((reason, final)),
            timeout_s,
        )

    control_loop.call_soon(start)
    return outcome


def accept(listener: socket.socket, secret: bytes = b"secret") -> tuple[socket.socket, ServerHandshake, Hello]:
    """The side of the server, up to our welcome."""
    listener.setblocking(True)
    sock, _ = listener.accept()
    sock.settimeout(PATIENCE_S)
    handshake, frames = ServerHandshake(secret), FrameReader()
    sock.sendall(HEARTBEAT_BYTES + handshake.challenge().encode())
    while not (come := list(frames.feed(sock.recv(1 << 12)))):
        pass
    return sock, handshake, handshake.accept(come[0])


def test_data_after_the_handshake_is_left_to_the_owner_of_the_socket(control_loop: ControlLoop) -> None:
    """A server may write to the connection right after it has accepted the client."""
    with bind("127.0.0.1", 0) as listener:
        outcome = dial(control_loop, listener.getsockname())
        theirs, handshake, hello = accept(listener)
        assert hello.host == "127.0.0.1"
        theirs.sendall(handshake.welcome().encode() + b"data")
        ours = outcome.get(timeout=PATIENCE_S)
        with ours, theirs:
            ours.settimeout(PATIENCE_S)
            assert ours.recv(1 << 12) == b"data"


@pytest.mark.parametrize("final", [True, False])
def test_a_refusal_is_reported_with_its_reason(control_loop: ControlLoop, final: bool) -> None:
    with bind("127.0.0.1", 0) as listener:
        outcome = dial(control_loop, listener.getsockname())
        theirs, _, _ = accept(listener)
        with theirs:
            theirs.sendall(Frame(Kind.REFUSE, (b"full", b"0" if final else b"1")).encode())
            assert outcome.get(timeout=PATIENCE_S) == ("full", final)


def test_a_server_that_says_nothing_is_given_up_after_the_timeout(control_loop: ControlLoop) -> None:
    with bind("127.0.0.1", 0) as listener:
        assert dial(control_loop, listener.getsockname(), 0.1).get(timeout=PATIENCE_S) == ("no answer", False)


@pytest.mark.parametrize("path", ["/nonexistent/socket", "a\0b", "/" + 200 * "x"])
def test_a_path_that_cannot_be_reached_is_a_failure_that_is_not_final(control_loop: ControlLoop, path: str) -> None:
    reason, final = dial(control_loop, path).get(timeout=PATIENCE_S)
    assert reason
    assert not final


ROSTER = Roster(3, "name", (Address("", 0, "/run/a"), Address("::1", 65535, ""), Address("", 0, "")))


def test_a_roster_survives_encoding_with_the_address_at_which_rank_0_was_reached() -> None:
    decoded = Roster.decode(3, ROSTER.encode(), 3, ("10.0.0.1", 29500))
    assert decoded.addresses[0] == Address("10.0.0.1", 29500, "/run/a")
    assert (decoded.formation, decoded.addresses[1:]) == ("name", ROSTER.addresses[1:])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"[1, []]",
        b'["f", [["", 0, ""]]]',
        b'["f", [["", 0, ""], ["host.example", 1, ""]]]',
        b'["f", [["", 0, ""], ["127.0.0.1", 65536, ""]]]',
        b'["f", [["", 0, ""], ["127.0.0.1", true, ""]]]',
        b'["f", [["", 0, ""], [2130706433, 1, ""]]]',
        b'["f", [["", 0, ""], ["", 0, null]]]',
        b'["f", [["", 0, ""], ["", 0]]]',
    ],
)
def test_an_invalid_roster_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        Roster.decode(1, data, 2, ("127.0.0.1", 1))
