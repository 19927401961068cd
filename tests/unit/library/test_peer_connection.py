"""A peer connection delivers messages in the order of their tag to waiting receivers, and validates everything it receives."""

import asyncio
import os
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import torch

from multiworld.errors import Cause
from multiworld.ops.operation import Message, Operation, Send
from multiworld.ops.p2p import recv, send
from multiworld.ops.validation import WorldFacts
from multiworld.transport.connection import PeerConnection, SocketPayloads
from multiworld.transport.poller import poller_of
from multiworld.transport.queues import MAX_CREDITS
from multiworld.transport.wire import HEAD, MESSAGE, RECV_READY, encode_signature, message_head, pack_head
from tests.waiting import until

PATIENCE_S = 30.0
BIG = 6_000_000
FACTS = WorldFacts("w", 0, 2)


class Owner:
    """A world that only records its calls."""

    def __init__(self) -> None:
        self.completed: list[Operation] = []
        self.lost: list[tuple[list[Message], str]] = []
        self.protocol_errors: list[str] = []
        self.errors: list[str] = []
        self.then: Callable[[], object] = lambda: None

    def on_transferred(self, operation: Operation) -> None:
        self.completed.append(operation)
        self.then()

    def on_connection_lost(self, peer: int, pending: list[Message], reason: str) -> None:
        self.lost.append((pending, reason))

    def on_error(self, peer: int, cause: Cause, detail: str) -> None:
        (self.errors if cause is Cause.LOCAL else self.protocol_errors).append(detail)


class End:
    """A peer connection and the calls of its world."""

    def __init__(self, sock: socket.socket, payloads: SocketPayloads | None = None) -> None:
        self.owner = Owner()
        self.lock = threading.RLock()
        poller = poller_of(asyncio.get_running_loop())
        self.connection = PeerConnection(1, sock, self.lock, self.owner, poller, payloads or SocketPayloads())

    def start(self, message: Message, head: bytes = b"", data: torch.Tensor | None = None) -> Message:
        message.future = asyncio.get_running_loop().create_future()
        message.head = head
        if data is not None:
            message.set_data(data)
        with self.lock:
            (self.connection.send if isinstance(message, Send) else self.connection.receive)(message)
        return message

    def send(self, tensor: torch.Tensor, tag: int = 0) -> Operation:
        message = send(FACTS, tensor, 1, tag)
        return self.start(message, message_head(message.signature, tag, tensor.nbytes), tensor)

    def receive(self, tensor: torch.Tensor, tag: int = 0) -> Operation:
        message = recv(FACTS, tensor, 1, tag)
        return self.start(message, encode_signature(message.signature), tensor)

    async def until_completed(self, *operations: Operation) -> None:
        await until(lambda: all(operation in self.owner.completed for operation in operations))


Pair = tuple[End, End]
OneEnd = tuple[End, socket.socket]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    one, other = map(End, socket.socketpair())
    yield one, other
    for end in (one, other):
        end.connection.close()


@pytest.fixture
async def end() -> AsyncIterator[OneEnd]:
    """A peer connection, and the plain socket at the other end of it."""
    ours, theirs = socket.socketpair()
    made = End(ours)
    theirs.setblocking(False)
    with theirs:
        yield made, theirs
        made.connection.close()


async def heard(sock: socket.socket, count: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    async with asyncio.timeout(PATIENCE_S):
        while len(data) < count:
            data += await loop.sock_recv(sock, count - len(data))
    return data


def posted(tag: int = 0) -> bytes:
    return pack_head(RECV_READY, tag)


async def settled() -> None:
    """Wait until the loop has processed everything readable."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_nothing_is_sent_before_a_receive_is_posted(end: OneEnd) -> None:
    made, peer = end
    operations = [made.send(torch.full((4,), float(tag)), tag) for tag in (1, 2)]
    await settled()
    with pytest.raises(BlockingIOError):
        peer.recv(1)
    assert not made.owner.completed
    peer.send(posted(2))
    await made.until_completed(operations[1])
    head, data = (await heard(peer, HEAD.size + 16))[: HEAD.size], torch.full((4,), 2.0).numpy().tobytes()
    assert HEAD.unpack(head) == (MESSAGE, 2, 16, encode_signature("float32[4]"), 0, 0)
    peer.send(posted(1))
    await made.until_completed(*operations)
    assert (await heard(peer, HEAD.size + 16))[HEAD.size :] != data


async def test_messages_of_a_tag_arrive_in_order_in_any_order_of_tags(pair: Pair) -> None:
    one, other = pair
    chance = random.Random(1)
    sizes = [0, 1, 100, 9_000, 300_000]
    plan = [(tag, chance.choice(sizes), number) for number, tag in enumerate(chance.choices(range(4), k=60))]
    sent = [one.send(torch.full((size,), float(number)), tag) for tag, size, number in plan]
    got: list[tuple[torch.Tensor, int, Operation]] = []
    for tag in (3, 1, 0, 2):
        for each, size, number in plan:
            if each == tag:
                tensor = torch.zeros(size)
                got.append((tensor, number, other.receive(tensor, tag)))
        await other.until_completed(*(operation for _, _, operation in got))
    await one.until_completed(*sent)
    for tensor, number, _ in got:
        assert set(tensor.tolist()) <= {float(number)}


async def test_fragmented_message_is_received_completely(end: OneEnd) -> None:
    made, peer = end
    tensors = [torch.zeros(5, dtype=torch.int16), torch.zeros(0), torch.zeros(3, dtype=torch.int16)]
    operations = [made.receive(tensor) for tensor in tensors]
    assert await heard(peer, 3 * HEAD.size) == 3 * posted()
    stream = b"".join(
        pack_head(MESSAGE, 0, len(data), encode_signature(signature)) + data
        for signature, data in (("int16[5]", bytes(range(10))), ("float32[0]", b""), ("int16[3]", b"abcdef"))
    )
    for at in range(len(stream)):
        peer.send(stream[at : at + 1])
        await asyncio.sleep(0)
    await made.until_completed(*operations)
    assert tensors[0].numpy().tobytes() == bytes(range(10))
    assert tensors[2].numpy().tobytes() == b"abcdef"


async def test_receive_credits_are_sent_before_messages_that_have_not_started(end: OneEnd) -> None:
    """Otherwise the peer would get them only after all queued messages."""
    made, peer = end
    peer.send(2 * posted())
    await settled()
    first = [made.send(torch.zeros(BIG, dtype=torch.uint8)) for _ in range(2)]
    assert not made.owner.completed  # the first has started
    made.receive(torch.zeros(1), tag=7)
    come = await heard(peer, HEAD.size + BIG + HEAD.size)
    assert come[HEAD.size + BIG :] == posted(7)
    rest = asyncio.create_task(heard(peer, HEAD.size + BIG))
    await made.until_completed(*first)
    await rest


INVALID = {
    "random bytes": (b"\xee" + os.urandom(4096), "invalid data: a head of kind 238"),
    "a message without a receiver": (
        message_head("float32[4]", 5, 16),
        "a message with tag 5, for which no receive is pending",
    ),
    "a longer message": (message_head("float32[5]", 0, 20), "it sent float32[5] where float32[4] was expected"),
    "a shorter message": (message_head("float32[3]", 0, 12), "it sent float32[3] where float32[4] was expected"),
    "another dtype": (message_head("int32[4]", 0, 16), "it sent int32[4] where float32[4] was expected"),
    "a size that is not the signature's": (message_head("float32[4]", 0, 1 << 60), "where float32[4] was expected"),
    "too many waiting messages": ((MAX_CREDITS + 1) * posted(1), "it granted more than"),
}


@pytest.mark.parametrize("what", INVALID)
async def test_protocol_error_is_reported_once_and_its_data_is_dropped(end: OneEnd, what: str) -> None:
    made, peer = end
    data, words = INVALID[what]
    tensor = torch.full((4,), 7.0)
    made.receive(tensor)
    saying = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(peer, data + b"\xff" * 64))
    await until(lambda: bool(made.owner.protocol_errors))
    saying.cancel()
    await asyncio.gather(saying, return_exceptions=True)
    await settled()
    assert len(made.owner.protocol_errors) == 1
    assert words in made.owner.protocol_errors[0]
    assert not made.owner.completed
    assert not made.owner.lost
    assert tensor.tolist() == [7.0] * 4
    with pytest.raises(RuntimeError), made.lock:
        made.connection.receive(recv(FACTS, torch.zeros(1), 1, 0))


@pytest.mark.parametrize("come", [0, 1, HEAD.size, HEAD.size + 1000, HEAD.size + 100_000])
async def test_pending_messages_fail_when_the_connection_is_lost(end: OneEnd, come: int) -> None:
    made, peer = end
    peer.send(posted(3))
    await settled()
    operations = {
        made.receive(torch.zeros(200_000, dtype=torch.uint8)),
        made.receive(torch.zeros(1), tag=1),
        made.send(torch.zeros(1), tag=2),
        made.send(torch.zeros(BIG), tag=3),
    }
    message = message_head("uint8[200000]", 0, 200_000) + bytes(200_000)
    await asyncio.get_running_loop().sock_sendall(peer, message[:come])
    await settled()
    peer.close()
    await until(lambda: bool(made.owner.lost))
    ((lost, reason),) = made.owner.lost
    assert set(lost) == operations
    assert len(lost) == len(operations)
    assert reason
    assert made.connection.end_reason == reason


async def test_event_loop_runs_other_work_while_a_peer_sends_continuously(end: OneEnd) -> None:
    made, peer = end
    size = 64 << 20
    operation = made.receive(torch.zeros(size, dtype=torch.uint8))
    peer.setblocking(True)
    feeding = threading.Thread(target=lambda: peer.sendall(message_head(f"uint8[{size}]", 0, size) + bytes(size)))
    feeding.start()
    turns = 0
    while operation not in made.owner.completed:
        turns += 1
        await asyncio.sleep(0)
    feeding.join()
    assert turns > 32


class Narrow:
    """A socket whose kernel buffer takes `room` bytes, and nothing more until it gets new room."""

    def __init__(self, sock: socket.socket, room: int) -> None:
        self._sock, self.room = sock, room

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)

    def sendmsg(self, buffers: list[bytes]) -> int:
        if not self.room:
            raise BlockingIOError
        taken, self.room = self.room, 0
        return self._sock.send(b"".join(bytes(buffer) for buffer in buffers)[:taken])


@pytest.mark.parametrize("gone", [1, HEAD.size - 1, HEAD.size])
async def test_nothing_is_sent_between_the_parts_of_a_message(
    end: OneEnd, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    made, peer = end
    peer.send(posted())
    await settled()
    narrow = Narrow(made.connection.sock, gone)
    monkeypatch.setattr(made.connection, "sock", narrow)
    sent = made.send(torch.full((3,), 9, dtype=torch.uint8))
    made.receive(torch.zeros(1), tag=7)
    narrow.room = 1 << 20
    await made.until_completed(sent)
    come = await heard(peer, 2 * HEAD.size + 3)
    assert come == message_head("uint8[3]", 0, 3) + b"\t\t\t" + posted(7)


async def test_messages_are_read_in_order_when_the_owner_reenters_the_connection(
    end: OneEnd,
) -> None:
    """Like an algorithm that an eager task factory runs inside `on_transferred`."""
    made, peer = end
    count = 400  # more than one read returns
    tensors = [torch.zeros(4) for _ in range(count)]
    arrivals = [made.receive(tensor) for tensor in tensors]
    answers = iter(range(count))
    made.owner.then = lambda: made.send(torch.zeros(1), tag=1 + next(answers))
    messages = [
        message_head("float32[4]", 0, 16) + torch.full((4,), float(each)).numpy().tobytes() for each in range(count)
    ]
    await asyncio.get_running_loop().sock_sendall(peer, b"".join(messages))
    await made.until_completed(*arrivals)
    assert [tensor[0].item() for tensor in tensors] == list(range(count))
    assert not made.owner.protocol_errors
