"""The link of a frontend and a leader: messages over their world, and requests with their replies.

A message is a header of fixed length, a body as JSON, which is one of the types of `messages`, and a payload. Messages that are queued
while others are on their way travel together in one transfer, so the requests of a busy service share the cost of a transfer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from multiworld import BrokenWorldException, Cause, World, WorldClosedError
from multiworld.texts import one_line
from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.message import Message, MessageKind, WireError
from multiworld_serving.server.frontends.messages import AnyBody, Rejection
from multiworld_serving.server.predictor import MAX_ROW_BYTES

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("!BQII7x")
"""Kind, number, bytes of JSON, bytes of payload. Headers and payloads start at a multiple of `_ALIGNED_BYTES`."""
_ALIGNED_BYTES = 8
MAX_BYTES = 8 * MAX_ROW_BYTES
"""Maximum payload of one message."""
_MAX_ERROR_CHARS = 200
_TRANSFER_BYTES = 1 << 22
"""A transfer is closed when it has this size."""
_MAX_UNSENT_BYTES = 1 << 22
"""Bytes queued for sending above which `Link.wait_writable` waits."""
_MAX_BACKLOG_BYTES = 2 * MAX_BYTES
"""Bytes queued for sending above which the link fails: some senders do not wait."""
Reply = tuple[Any, bytes | memoryview]
"""Body and payload."""
_HEALTHY = frozenset({Cause.LEFT, Cause.ABORTED})


def _encode_tensor(value: object) -> None:
    """A tensor is not in the JSON: its rows are the payload."""
    if not isinstance(value, Tensor):
        raise NotImplementedError(f"a message with a {type(value).__name__}")


def _decode_tensor(_type: type, _value: object) -> Tensor:
    return torch.empty(0)


_DECODER = msgspec.json.Decoder(AnyBody, dec_hook=_decode_tensor)
_ENCODER = msgspec.json.Encoder(enc_hook=_encode_tensor)


class Kind(IntEnum):
    """What a message is for."""

    MESSAGE = 1
    """With a number, a reply is expected."""
    STEP = 2
    """Comes before the reply."""
    REPLY = 3
    CANCEL = 4
    """The reply with this number is not needed any more."""


class Received(NamedTuple):
    """A received message.

    Attributes:
        body: None in a CANCEL.
        payload: writable; not shared with other messages.
    """

    kind: Kind
    number: int
    body: Any
    payload: memoryview = memoryview(b"")


class LinkLostError(Exception):
    """The link ended before the reply.

    Attributes:
        failed: whether the other process failed; False if it left, or this process failed.
    """

    def __init__(self, detail: str, *, failed: bool) -> None:
        super().__init__(detail)
        self.failed = failed


def encode(kind: Kind, number: int = 0, body: Any = None, payload: bytes | memoryview = b"") -> bytearray:
    """One message, padded so that the next one is aligned."""
    text = b"" if body is None else _ENCODER.encode(body)
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    data = bytearray(_HEAD.pack(kind, number, len(text), len(payload)))
    data += text
    data += payload
    data += bytes(-len(data) % _ALIGNED_BYTES)
    return data


def decode(data: memoryview) -> Iterator[Received]:
    """The messages of one transfer. Raises ValueError if it is invalid."""
    at = 0
    while at < len(data):
        if len(data) - at < _HEAD.size:
            raise ValueError("a message ends in its header")
        kind, number, text_bytes, payload_bytes = _HEAD.unpack_from(data, at)
        text = at + _HEAD.size
        end = text + text_bytes + payload_bytes
        if end > len(data):
            raise ValueError(f"a message of {text_bytes} + {payload_bytes} bytes is longer than its transfer")
        body = None
        if kind != Kind.CANCEL:
            try:
                body = _DECODER.decode(data[text : text + text_bytes])
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                raise ValueError(
                    f"{one_line(str(error), _MAX_ERROR_CHARS)}; do both sides run the same release?"
                ) from error
        yield Received(Kind(kind), number, body, data[text + text_bytes : end])
        at = end + -end % _ALIGNED_BYTES


class Link:
    """One end of the link of a frontend and a leader.

    Args:
        receive: called with each message that is no reply. A ValueError of it, for an invalid message, ends the link.
    """

    def __init__(self, world: World, peer: int, receive: Callable[[Received], None]) -> None:
        self.world = world
        self._channel = Channel(world, peer, _check)
        self._receive = receive
        self._numbers = itertools.count(1)
        self._replies: dict[int, Callable[[Received | LinkLostError], object]] = {}
        """What takes the reply to a message of this end, by its number."""
        self._calls: dict[int, asyncio.Future[Received]] = {}
        """The results of the calls of this end, by number."""
        self._handling: dict[int, Callable[[], object]] = {}
        """What cancels the work for a message of the other end that expects a reply, by its number."""
        self._queue: list[bytes | bytearray] = []
        self._queued_bytes = 0
        self._sending = False
        """Whether a transfer is on its way, or `_send_next` is about to be called."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended = False

    # -- messages of this end ----------------------------------------------------------------------------------------------------

    def send(self, body: Any) -> None:
        """Queue a message without a reply; does nothing if the link has ended."""
        self.send_encoded(encode(Kind.MESSAGE, 0, body))

    async def call(self, body: Any, payload: bytes | memoryview = b"", *, timeout_s: float | None) -> Received:
        """Send a message and wait for its reply. Cancelling withdraws it.

        Raises:
            LinkLostError: the link ended before the reply.
            TimeoutError: no reply within `timeout_s`; never if it is None.
            Exception: which the other end has replied with; see `Rejection`.
        """
        future: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
        number = self._expect_reply(partial(_settle, future))
        self._calls[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                if not self._writable.is_set():
                    await self.wait_writable()
                self.send_encoded(encode(Kind.MESSAGE, number, body, payload))
                return await future
        finally:
            del self._replies[number], self._calls[number]
            if future.cancelled() or not future.done():
                self.send_encoded(encode(Kind.CANCEL, number))

    def withdraw_calls(self, detail: str) -> None:
        """End all calls with a LinkLostError, although the link continues. Late replies are dropped."""
        for number, future in tuple(self._calls.items()):
            self.send_encoded(encode(Kind.CANCEL, number))
            _settle(future, LinkLostError(detail, failed=False))

    async def stream(self, body: Any) -> AsyncGenerator[Any, None]:
        """Send a message; yield the body of each step, and that of the reply at the end. Closing it withdraws the message.

        Raises as `call`.
        """
        arrived: asyncio.Queue[Received | LinkLostError] = asyncio.Queue()
        number = self._expect_reply(arrived.put_nowait)
        self.send_encoded(encode(Kind.MESSAGE, number, body))
        finished = False
        try:
            while not finished:
                found = await arrived.get()
                finished = isinstance(found, LinkLostError) or found.kind is Kind.REPLY
                yield _result(found).body
        finally:
            del self._replies[number]
            if not finished:
                self.send_encoded(encode(Kind.CANCEL, number))

    def _expect_reply(self, take: Callable[[Received | LinkLostError], object]) -> int:
        if self._ended:
            raise LinkLostError("not connected", failed=False)
        number = next(self._numbers)
        self._replies[number] = take
        return number

    # -- messages of the other end ---------------------------------------------------------------------------------------------

    def reply(self, number: int, body: Any, payload: bytes | memoryview = b"", kind: Kind = Kind.REPLY) -> None:
        """Queue the reply to the message with this number, or a step of it."""
        self.send_encoded(encode(kind, number, body, payload))

    def handle(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        """Run this work, and reply with the body that it returns or its exception. Cancelled as `expect_cancel` says, and raises as it."""
        task = asyncio.ensure_future(work)
        self.expect_cancel(number, task.cancel)
        task.add_done_callback(lambda done: self.finish(number, lambda: (done.result(), b"")))

    def expect_cancel(self, number: int, cancel: Callable[[], object]) -> None:
        """Call `cancel` if the other end withdraws its message or the link ends, unless `finish` comes first.

        Raises ValueError if the number is in use.
        """
        if number in self._handling:
            cancel()
            raise ValueError(f"the number {number} is in use")
        self._handling[number] = cancel

    def finish(self, number: int, result: Callable[[], Reply]) -> None:
        """Reply with what `result` returns or raises. Does nothing if the work was cancelled."""
        if self._handling.pop(number, None) is None:
            return
        try:
            body, payload = result()
        except Exception as error:  # noqa: BLE001 - reported to the other end
            self.reply_error(number, error)
        else:
            self.reply(number, body, payload)

    def reply_error(self, number: int, error: Exception) -> None:
        """Reply with this exception."""
        body = Rejection.of(error)
        if body.is_internal:
            logger.error("world=%s message %d failed", self.world.name, number, exc_info=error)
        self.reply(number, body)

    # -- transfers -------------------------------------------------------------------------------------------------------------

    def send_encoded(self, data: bytes | bytearray) -> None:
        """Queue an encoded message; does nothing if the link has ended. A `bytearray` belongs to the link from now on."""
        if self._ended:
            return
        self._queue.append(data)
        self._queued_bytes += len(data)
        if self._queued_bytes > _MAX_UNSENT_BYTES:
            self._writable.clear()
            if self._queued_bytes > _MAX_BACKLOG_BYTES:
                self.fail(f"the other end did not read {self._queued_bytes} bytes")
        if not self._sending:  # with the messages that are queued until then
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send_next)

    async def wait_writable(self) -> None:
        """Wait until the queue is short enough, or the link has ended."""
        while not self._writable.is_set() and not self._ended:  # other waiters may have filled the queue again
            await self._writable.wait()

    async def run(self) -> LinkLostError:
        """Receive messages until the link ends; returns why it ended. Then all calls of this end raise it."""
        lost = LinkLostError("this process stops", failed=False)
        try:
            while True:
                message = await self._channel.receive()
                assert message.payload is not None
                for received in decode(message.payload.numpy().data.cast("B")):
                    if received.kind is Kind.MESSAGE:
                        self._receive(received)
                    elif received.kind is Kind.CANCEL:
                        self._cancel(received.number)
                    elif (take := self._replies.get(received.number)) is not None:
                        take(received)
        except (BrokenWorldException, WorldClosedError) as ending:
            failed = isinstance(ending, BrokenWorldException) and (
                ending.rank == self._channel.peer and ending.cause not in _HEALTHY
            )
            lost = LinkLostError(str(ending), failed=failed)
        except ValueError as error:
            # The other end may have another release or another model. A failure of the world would be logged at each attempt to join.
            lost = LinkLostError(f"invalid message ({type(error).__name__}: {error!s:.300})", failed=True)
            self.world.close()
        finally:
            self._end()
            for number in tuple(self._handling):
                self._cancel(number)
            for take in tuple(self._replies.values()):
                take(lost)
        return lost

    def fail(self, detail: str) -> None:
        """Break the world."""
        self.world.fail(Cause.ERROR, self._channel.peer, detail)
        self._end()

    def _end(self) -> None:
        """Send nothing more."""
        self._ended = True
        self._queue.clear()
        self._writable.set()

    def _cancel(self, number: int) -> None:
        if (cancel := self._handling.pop(number, None)) is not None:
            cancel()

    def _send_next(self, _sent: object = None) -> None:
        """Send queued messages in one transfer. Called again when it is sent, until the queue is empty."""
        self._sending = False
        if self._queue:
            payload = torch.frombuffer(self._next_transfer(), dtype=torch.uint8)
            try:
                operation = self._channel.start(Message(MessageKind.FRAMES, payload=payload))
            except (BrokenWorldException, WorldClosedError):
                self._end()  # `run` reports it
                return
            self._sending = True
            operation.add_done_callback(self._send_next)

    def _next_transfer(self) -> bytearray:
        """Take queued messages until the transfer is large enough."""
        first, count = self._queue[0], 1
        data = first if isinstance(first, bytearray) else bytearray(first)
        while count < len(self._queue) and len(data) < _TRANSFER_BYTES:
            data += self._queue[count]
            count += 1
        del self._queue[:count]
        self._queued_bytes -= len(data)
        if self._queued_bytes <= _MAX_UNSENT_BYTES:
            self._writable.set()
        return data


def _settle(future: asyncio.Future[Received], found: Received | LinkLostError) -> None:
    if future.done():
        return  # the waiter was cancelled
    try:
        future.set_result(_result(found))
    except Exception as error:  # noqa: BLE001 - raised to the waiter
        future.set_exception(error)


def _result(found: Received | LinkLostError) -> Received:
    """Raises the exception that it is."""
    if isinstance(found, LinkLostError):
        raise LinkLostError(str(found), failed=found.failed)
    if isinstance(found.body, Rejection):
        raise found.body.error()
    return found


def _check(message: Message) -> None:
    if message.kind is not MessageKind.FRAMES:
        raise WireError(f"unexpected {message.kind.name} between frontend and leader")
    message.require_batch(torch.uint8, (), 1, MAX_BYTES + (1 << 20))
