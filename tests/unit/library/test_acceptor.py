"""Which connections an acceptor admits, keeps waiting, or closes."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from multiworld.config import HeartbeatConfig
from multiworld.control.frames import (
    HEARTBEAT_BYTES,
    Challenge,
    Frame,
    FrameReader,
    Heartbeat,
    MemberFailed,
    Refuse,
    Start,
    StoreSet,
    Welcome,
)
from multiworld.control.handshake import ClientHandshake, Hello
from multiworld.control.loop import ControlLoop
from multiworld.errors import Cause
from multiworld.execution.store import ControlStore
from multiworld.membership import acceptor as acceptor_module
from multiworld.membership.acceptor import Acceptor, listen_on
from multiworld.membership.monitor import MembershipMonitor
from multiworld.texts import MAX_TEXT_CHARS

PATIENCE_S = 30.0
PATIENT = HeartbeatConfig(0.05, 3600.0)


class Events:
    """A world that records its events."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[object, ...]] = SimpleQueue()
        self.details: list[str] = []

    def next(self) -> tuple[object, ...]:
        return self.queue.get(timeout=PATIENCE_S)

    def fail(self, cause: Cause, rank: int, detail: str = "") -> None:
        self.details.append(detail)
        self.queue.put(("failed", rank, cause))


class RecordingStore(ControlStore):
    """The rendezvous of a world, which records what the members set."""

    def __init__(self, events: Events) -> None:
        super().__init__(lambda _key, _value: None)
        self._queue = events.queue

    def receive(self, key: str, value: bytes) -> None:
        self._queue.put(("stored", key, value))


def started(generation: int) -> Start:
    return Start(generation, "", ())


class Client:
    """The other end of a connection, step by step."""

    def __init__(self, port: int, hello: Hello, secret: bytes = b"secret") -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.settimeout(PATIENCE_S)
        self._frames = FrameReader()
        self._come: list[Frame] = []
        self.handshake = ClientHandshake(secret, hello)

    def next(self) -> Frame | None:
        """The next frame that is neither a heartbeat nor a valid welcome, `Start` without its addresses; None at the end."""
        while True:
            while self._come:
                frame = self._come.pop(0)
                if isinstance(frame, Start):
                    return started(frame.generation)
                if isinstance(frame, Welcome):
                    self.handshake.check_welcome(frame)
                elif not isinstance(frame, Heartbeat):
                    return frame
            if not self._read():
                return None

    def _read(self) -> bool:
        data = self.sock.recv(1 << 16)
        self._come += self._frames.feed(data)
        return bool(data)

    def enter(self) -> "Client":
        """Authenticate, and wait until the acceptor has read the request: it sends a heartbeat, a welcome or a refusal."""
        challenge = self.next()
        assert challenge is not None
        self.sock.sendall(self.handshake.hello(challenge).encode())
        while not self._come:
            self._read()
        return self


class AcceptorHarness:
    """An acceptor and its worlds."""

    def __init__(self, control_loop: ControlLoop) -> None:
        self.control_loop = control_loop
        self.acceptor = Acceptor(control_loop, listen_on(("127.0.0.1", 0)), [b"secret"])
        self.clients: list[Client] = []
        self.tasks: set[asyncio.Task[None]] = set()
        control_loop.call_soon(self.acceptor.open)

    def host(self, world: str = "w", size: int = 2, generation: int = 1) -> Events:
        events = Events()
        self.monitor(events, PATIENT, Hello(world, 0, size, generation))
        return events

    def monitor(self, events: Events, heartbeat: HeartbeatConfig, member: Hello) -> MembershipMonitor:
        """Rank 0 of a world that opens."""

        async def host(monitor: MembershipMonitor) -> None:
            start = await monitor.host()
            events.queue.put(("all joined", start.generation, len(start.addresses)))

        def make() -> MembershipMonitor:
            monitor = MembershipMonitor(self.control_loop, events, member, heartbeat, RecordingStore(events))
            self.tasks.add(self.control_loop.loop.create_task(host(monitor)))
            self.acceptor.add(monitor)
            return monitor

        monitor = self.on_control_loop(make)
        assert isinstance(monitor, MembershipMonitor)
        return monitor

    def client(
        self, world: str = "w", rank: int = 1, size: int = 2, generation: int = 0, secret: bytes = b"secret"
    ) -> Client:
        client = Client(self.acceptor.port, Hello(world, rank, size, generation), secret)
        self.clients.append(client)
        return client

    def on_control_loop(self, call: Callable[[], object]) -> object:
        done: SimpleQueue[object] = SimpleQueue()
        self.control_loop.call_soon(lambda: done.put(call()))
        return done.get(timeout=PATIENCE_S)


@pytest.fixture
def harness() -> Iterator[AcceptorHarness]:
    control_loop = ControlLoop()
    control_loop.start()
    made = AcceptorHarness(control_loop)
    yield made
    control_loop.call_soon(made.acceptor.close)
    control_loop.stop()
    for client in made.clients:
        client.sock.close()


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ({"size": 3}, "rank 1 of 3 cannot join a world of size 2"),
        ({"rank": 0}, "rank 0 of 2 cannot join a world"),
        ({"rank": 2}, "rank 2 of 2 cannot join a world"),
        ({"rank": -1}, "rank -1 of 2 cannot join a world"),
        ({"generation": 4}, "generation 4 has formed already; the current one is 5"),
    ],
)
def test_member_is_refused_when_its_rank_does_not_exist(
    harness: AcceptorHarness, wish: dict[str, int], reason: str
) -> None:
    harness.host(generation=5)
    client = harness.client(**wish).enter()  # type: ignore[arg-type]
    rejection = client.next()
    assert isinstance(rejection, Refuse)
    assert rejection.reason.startswith(reason)
    assert not rejection.retry
    assert client.next() is None


def test_member_may_retry_when_its_rank_is_taken(harness: AcceptorHarness) -> None:
    harness.host(size=3)
    harness.client(size=3).enter()
    second = harness.client(size=3).enter()
    assert second.next() == Refuse("rank 1 is taken", True)


def test_member_without_a_requested_generation_waits_for_the_next_when_this_one_has_started(
    harness: AcceptorHarness,
) -> None:
    first = harness.host()
    harness.client().enter()
    first.next()
    waiting = harness.client().enter()
    second = harness.host(generation=2)
    assert second.next() == ("all joined", 2, 2)
    assert waiting.next() == started(2)


def test_next_generation_admits_members_when_the_former_one_ends_late(harness: AcceptorHarness) -> None:
    former = harness.monitor(Events(), PATIENT, MEMBER)
    events = harness.host(generation=2)
    harness.on_control_loop(lambda: harness.acceptor.remove(former))
    harness.client().enter()
    assert events.next() == ("all joined", 2, 2)


def test_the_newer_of_two_clients_for_one_rank_is_admitted(harness: AcceptorHarness) -> None:
    """The earlier one may belong to a process that has been restarted."""
    _, younger = harness.client().enter(), harness.client().enter()
    harness.host().next()
    assert younger.next() == started(1)


def test_rank_is_free_again_when_its_member_leaves_before_the_start(harness: AcceptorHarness) -> None:
    events = harness.host(size=3)
    harness.client(size=3).enter().sock.close()
    harness.client(rank=2, size=3).enter()
    for _ in range(1000):  # until the end of the first connection has been detected
        heir = harness.client(size=3).enter()
        answer = heir.next()
        assert answer is not None
        if isinstance(answer, Start):
            break
    assert events.next() == ("all joined", 1, 3)


def test_long_failure_report_of_a_member_is_truncated_and_escaped(harness: AcceptorHarness) -> None:
    events = harness.host()
    member = harness.client().enter()
    events.next()
    member.sock.sendall(MemberFailed(1, Cause.ERROR, "\x1b[2J" + "x" * 100_000).encode())
    assert events.next() == ("failed", 1, Cause.ERROR)
    (detail,) = events.details
    assert detail.startswith("\\x1b[2Jxxx")
    assert len(detail) == MAX_TEXT_CHARS


def test_client_is_closed_when_it_does_not_authenticate_in_time(
    harness: AcceptorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor_module, "_HANDSHAKE_S", 0.1)
    silent, drip = harness.client(), harness.client()
    drip.sock.sendall(b"\0")
    for client in (silent, drip):
        assert isinstance(client.next(), Challenge)
        assert client.next() is None


def test_client_is_closed_when_it_sends_only_heartbeats(harness: AcceptorHarness) -> None:
    """A million heartbeats per second would keep the control loop from its worlds."""
    stranger = socket.create_connection(("127.0.0.1", harness.acceptor.port))
    stranger.settimeout(PATIENCE_S)
    with contextlib.suppress(ConnectionError):
        stranger.sendall(5_000 * HEARTBEAT_BYTES)
    come = b""
    with contextlib.suppress(ConnectionError):
        while data := stranger.recv(1 << 16):
            come += data
    assert len(list(FrameReader().feed(come))) <= 2
    harness.client().enter().sock.close()
    stranger.close()


def test_the_oldest_unauthenticated_client_is_closed_when_there_are_too_many(
    harness: AcceptorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor_module, "_MAX_UNAUTHENTICATED", 3)
    friend = harness.client("later").enter()
    strangers = [harness.client() for _ in range(5)]
    for stranger in strangers:
        stranger.next()
    for stranger in strangers[:2]:
        assert stranger.next() is None
    assert harness.on_control_loop(lambda: len(harness.acceptor._unauthenticated)) == 3
    strangers[4].sock.sendall(Heartbeat().encode())
    harness.host("later")
    assert friend.next() == started(1)


def test_all_clients_are_closed_when_the_acceptor_closes(harness: AcceptorHarness) -> None:
    waiting, stranger = harness.client().enter(), harness.client()
    stranger.next()
    harness.on_control_loop(harness.acceptor.close)
    assert waiting.next() is None
    assert stranger.next() is None
    with pytest.raises(ConnectionRefusedError):
        harness.client()


def test_members_get_reports_of_each_other_through_the_host(harness: AcceptorHarness) -> None:
    events = harness.host(size=3)
    first, second = harness.client(rank=1, size=3).enter(), harness.client(rank=2, size=3).enter()
    events.next()
    assert first.next() == second.next() == started(1)
    first.sock.sendall(StoreSet("key", b"value").encode())
    assert events.next() == ("stored", "key", b"value")
    assert second.next() == StoreSet("key", b"value")
    first.sock.sendall(MemberFailed(2, Cause.TRANSPORT, "").encode())
    assert events.next() == ("failed", 2, Cause.TRANSPORT)
    assert second.next() == MemberFailed(2, Cause.TRANSPORT, "")


@pytest.mark.parametrize("frame", [Welcome(b""), Refuse("", True)], ids=["welcome", "refuse"])
def test_member_that_violates_the_protocol_is_lost(harness: AcceptorHarness, frame: Frame) -> None:
    events = harness.host()
    member = harness.client().enter()
    events.next()
    member.sock.sendall(frame.encode())
    assert events.next() == ("failed", 1, Cause.EXIT)


MEMBER = Hello("w", 0, 2, 1)
