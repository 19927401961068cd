"""The control loop: timers, calls from other threads, sockets. It tolerates failing callbacks and stalls, its own and those of peers."""

import socket
import time
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from multiworld.control.connection import ControlConnection, StallClock
from multiworld.control.frames import MAX_FRAME_BYTES, Frame, FrameError, Heartbeat, Left, MemberFailed, StoreSet
from multiworld.control.loop import ControlLoop
from multiworld.errors import Cause

PATIENCE_S = 30.0


@pytest.fixture
def control_loop() -> Iterator[ControlLoop]:
    made = ControlLoop()
    made.start()
    yield made
    made.stop()
    assert not made.running


class Owner:
    """Writes down what a control connection reports."""

    def __init__(self) -> None:
        self.events: SimpleQueue[object] = SimpleQueue()

    def on_frame(self, connection: ControlConnection, frame: Frame) -> None:
        if isinstance(frame, MemberFailed):
            raise TypeError("a frame that our side cannot handle")
        if isinstance(frame, Left):
            raise FrameError("unexpected")
        self.events.put(frame)

    def on_lost(self, connection: ControlConnection, reason: str) -> None:
        self.events.put(reason)

    def next(self) -> object:
        return self.events.get(timeout=PATIENCE_S)


class Ends:
    """A control connection and the plain socket at its other end."""

    def __init__(self, control_loop: ControlLoop) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.peer = socket.create_connection(server.getsockname())
            ours, _ = server.accept()
        ours.setblocking(False)
        self.owner = Owner()
        self._made: SimpleQueue[ControlConnection] = SimpleQueue()
        control_loop.call_soon(lambda: self._made.put(ControlConnection(control_loop, ours, self.owner)))
        self.connection = self._made.get(timeout=PATIENCE_S)


@pytest.fixture
def ends(control_loop: ControlLoop) -> Iterator[Ends]:
    made = Ends(control_loop)
    yield made
    made.peer.close()


def test_failing_callback_is_logged_and_does_not_stop_others(
    control_loop: ControlLoop, caplog: pytest.LogCaptureFixture
) -> None:
    done: SimpleQueue[str] = SimpleQueue()

    def fail() -> None:
        raise RuntimeError("on purpose")

    control_loop.call_soon(fail)
    control_loop.call_soon(control_loop.loop.call_later, 0.0, fail)
    control_loop.call_soon(control_loop.loop.call_later, 0.01, done.put, "timer")
    control_loop.call_soon(done.put, "call")
    assert {done.get(timeout=PATIENCE_S) for _ in range(2)} == {"call", "timer"}
    assert [record.exc_info is not None for record in caplog.records] == [True, True]


def test_scheduled_calls_run_before_the_stop() -> None:
    control_loop = ControlLoop()
    done: list[int] = []
    control_loop.start()
    for number in range(100):
        control_loop.call_soon(done.append, number)
    control_loop.stop()
    assert done == list(range(100))
    control_loop.call_soon(done.append, 100)  # harmless, and never run
    assert len(done) == 100


def test_own_stall_does_not_count_as_silence_of_peers(control_loop: ControlLoop, ends: Ends) -> None:
    seen: SimpleQueue[float] = SimpleQueue()
    before_s = ends.connection.last_received_s
    control_loop.call_soon(time.sleep, 0.5)  # like SIGSTOP, or a thread that holds the GIL
    control_loop.call_soon(control_loop.loop.call_later, 0.0, lambda: seen.put(ends.connection.last_received_s))
    assert seen.get(timeout=PATIENCE_S) >= before_s + 0.5


def test_silence_of_a_peer_counts_when_this_process_stalls_again_and_again(ends: Ends) -> None:
    no_loop: Any = SimpleNamespace(now_s=100.0, connections=set(), loop=SimpleNamespace(add_reader=lambda *_: None))
    connection = ControlConnection(no_loop, ends.peer, ends.owner)
    for _ in range(10):
        connection.credit_stall(0.3)
    assert connection.last_received_s == pytest.approx(101.0), "3 s, of which at most one is credited"
    connection.credit_stall(4.0)
    assert connection.last_received_s == pytest.approx(104.0), "the longest stall"


def test_frames_arrive_and_the_end_is_reported_once(ends: Ends) -> None:
    frames = [StoreSet("key", bytes([number]) * 1000) for number in range(100)]
    ends.peer.sendall(b"".join(frame.encode() for frame in frames))
    assert [ends.owner.next() for _ in frames] == frames
    ends.peer.close()
    assert ends.owner.next() == "it ended the connection"
    assert ends.owner.events.empty()


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "it sent an invalid frame: a frame of"),
        (Left(1).encode(), "it sent an invalid frame: unexpected"),
        (MemberFailed(1, Cause.EXIT, "").encode(), "its frame could not be handled"),
    ],
    ids=["garbage", "refused", "internal error"],
)
def test_control_connection_is_lost_when_it_carries(ends: Ends, sent: bytes, reason: str) -> None:
    ends.peer.sendall(sent + Heartbeat().encode())
    events = ends.owner.next()
    assert isinstance(events, str)
    assert events.startswith(reason)
    assert ends.peer.recv(1) == b""


def test_control_connection_is_lost_when_its_peer_does_not_read(control_loop: ControlLoop, ends: Ends) -> None:
    data = StoreSet("key", b"v" * (MAX_FRAME_BYTES - 100)).encode()
    for _ in range(50):
        control_loop.call_soon(ends.connection.send, data)
    assert ends.owner.next() == "it does not read what we send"
    assert len(ends.connection._outbox) <= 6 * MAX_FRAME_BYTES


def test_closed_control_connection_still_sends_its_queue(control_loop: ControlLoop, ends: Ends) -> None:
    data = b"x" * 3_000_000  # more than the socket buffers hold: the rest is sent after `close`
    control_loop.call_soon(ends.connection.send, data)
    control_loop.call_soon(ends.connection.close)
    received = 0
    while piece := ends.peer.recv(1 << 16):
        received += len(piece)
    assert received == len(data)
    assert ends.owner.events.empty()


def test_peer_is_stalled_while_its_count_stays() -> None:
    clock = StallClock()
    for now_s in range(5):
        clock.on_heartbeat(7, float(now_s), max_gap_s=2.0)
    assert clock.stalled_s == 4.0
    clock.on_heartbeat(8, 5.0, max_gap_s=2.0)
    assert clock.stalled_s == 0.0


def test_long_gap_counts_little_when_the_whole_process_was_stopped() -> None:
    clock = StallClock()
    clock.on_heartbeat(7, 0.0, max_gap_s=0.4)
    clock.on_heartbeat(7, 30.0, max_gap_s=0.4)
    assert clock.stalled_s == 0.4
