"""The link of a leader with a frontend or a worker: messages over their world, and requests with their replies.

Messages that are queued while others are on their way travel together in one transfer, so they share the cost of a transfer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import partial
from typing import Any

import torch

from multiworld import BrokenWorldException, Cause, World, WorldClosedError
from multiworld_serving.common.wire.protocol import Failure, Kind, Protocol, Received, Reply, WireError, encode

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 1 << 20
_TRANSFER_BYTES = 1 << 22
"""A transfer is closed when it has this size."""
_MAX_UNSENT_BYTES = 1 << 22
"""Bytes queued for sending above which `Link.wait_writable` waits."""
_MAX_BACKLOG_BYTES = 1 << 31
"""Bytes queued for sending above which the link fails: some senders do not wait."""
_HEALTHY = frozenset({Cause.LEFT, Cause.ABORTED})


class LinkLostError(Exception):
    """The link ended before the reply.

    Attributes:
        failed: whether the other process failed; False if it left, or this process failed.
        ending: how the world broke; None if it was closed, or if the other end sent an invalid message, in which case it has failed.
    """

    def __init__(self, detail: str, *, failed: bool, ending: BrokenWorldException | None = None) -> None:
        super().__init__(detail)
        self.failed = failed
        self.ending = ending

    @property
    def cause(self) -> Cause:
        """Why the link ended."""
        if self.ending is not None:
            return self.ending.cause
        return Cause.ERROR if self.failed else Cause.LEFT


class Link:
    """One end of the link of a leader with a frontend or a worker.

    Args:
        receive: called with each message that is no reply. A ValueError of it, for an invalid message, ends the link.

    Attributes:
        max_bytes: longest payload that the other end may send now.
    """

    def __init__(
        self, world: World, peer: int, protocol: Protocol, receive: Callable[[Received], None], max_bytes: int = 0
    ) -> None:
        self.world = world
        self.max_bytes = max_bytes
        self._protocol = protocol
        self._peer = peer
        self._receive = receive
        self._numbers = itertools.count(1)
        self._replies: dict[int, Callable[[Received | LinkLostError], object]] = {}
        """What takes the reply to a message of this end, by its number."""
        self._calls: dict[int, asyncio.Future[Received | LinkLostError]] = {}
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

    def send(self, body: Any, payload: bytes | memoryview = b"") -> None:
        """Queue a message without a reply; does nothing if the link has ended."""
        self.send_encoded(encode(Kind.MESSAGE, 0, body, payload))

    def ask(self, body: Any, payload: bytes | memoryview, take: Callable[[Received | LinkLostError], object]) -> None:
        """Queue a message; `take` is called with its reply, or when the link ends. Raises LinkLostError if it has ended."""
        self.send_encoded(encode(Kind.MESSAGE, self._expect_reply(take), body, payload))

    async def call(self, body: Any, payload: bytes | memoryview = b"", *, timeout_s: float | None) -> Received:
        """Send a message and wait for its reply. Cancelling withdraws it.

        Raises:
            LinkLostError: the link ended before the reply.
            TimeoutError: no reply within `timeout_s`; never if it is None.
            Exception: which the other end has replied with; see `Rejection`.
        """
        if timeout_s is not None:
            async with asyncio.timeout(timeout_s):
                return await self.call(body, payload, timeout_s=None)
        future: asyncio.Future[Received | LinkLostError] = asyncio.get_running_loop().create_future()
        number = self._expect_reply(partial(_settle, future))
        self._calls[number] = future
        try:
            if not self._writable.is_set():
                await self.wait_writable()
            self.send_encoded(encode(Kind.MESSAGE, number, body, payload))
            return _result(await future)
        finally:
            self._replies.pop(number, None)
            del self._calls[number]
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
            self._replies.pop(number, None)
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
        """Run this work, and reply with the body, or body and payload, that it returns, or its exception.

        Cancelled as `expect_cancel` says, and raises as it.
        """
        task = asyncio.ensure_future(work)
        self.expect_cancel(number, task.cancel)

        def result() -> Reply:
            found = task.result()
            return found if isinstance(found, tuple) else (found, b"")

        task.add_done_callback(lambda _: self.finish(number, result))

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
        self.reply(number, self._protocol.failure(error))

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
                transfer = await self.world.recv_view(self._check, self._peer)
                for received in self._protocol.decode(transfer.data.numpy().data):
                    self._take(received)
        except WorldClosedError as closed:
            lost = LinkLostError(str(closed), failed=False)
        except BrokenWorldException as ending:
            failed = ending.rank == self._peer and ending.cause not in _HEALTHY
            lost = LinkLostError(str(ending), failed=failed, ending=ending)
        except ValueError as error:  # the other end may have another release or another model
            logger.debug("world=%s a message is invalid, or cannot be handled", self.world.name, exc_info=True)
            lost = LinkLostError(f"invalid message ({type(error).__name__}: {error!s:.300})", failed=True)
        finally:
            self._end()
            for number in tuple(self._handling):
                self._cancel(number)
            for take in tuple(self._replies.values()):
                take(lost)
        return lost

    def _take(self, received: Received) -> None:
        number = received.number
        match received.kind:
            case Kind.MESSAGE:
                self._receive(received)
            case Kind.CANCEL:
                self._cancel(number)
            case kind:
                take = self._replies.get(number) if kind is Kind.STEP else self._replies.pop(number, None)
                if take is not None:
                    take(received)

    def _check(self, _header: bytes, size_bytes: int) -> None:
        """Reject a transfer that is too long before memory is allocated for it. May run on another thread."""
        most = self.max_bytes + _MAX_BODY_BYTES + _TRANSFER_BYTES  # the last message may be longer than a transfer
        if not 1 <= size_bytes <= most:
            raise WireError(f"a transfer of {size_bytes} bytes; expected 1 to {most}")

    def fail(self, detail: str) -> None:
        """Break the world."""
        self.world.fail(Cause.ERROR, self._peer, detail)
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
                operation = self.world.start_send_message(b"", payload, self._peer)
            except (BrokenWorldException, WorldClosedError):
                self._end()  # `run` reports it
                return
            self._sending = True
            operation.add_done_callback(self._send_next)

    def _next_transfer(self) -> bytearray:
        """Take queued messages until the transfer is large enough."""
        first, count = self._queue[0], 1
        size = len(first)
        while count < len(self._queue) and size < _TRANSFER_BYTES:
            size += len(self._queue[count])
            count += 1
        data = first if count == 1 and isinstance(first, bytearray) else bytearray().join(self._queue[:count])
        del self._queue[:count]
        self._queued_bytes -= len(data)
        if self._queued_bytes <= _MAX_UNSENT_BYTES:
            self._writable.set()
        return data


def _settle(future: asyncio.Future[Received | LinkLostError], found: Received | LinkLostError) -> None:
    if not future.done():  # otherwise the waiter was cancelled
        future.set_result(
            found
        )  # no exception: its traceback and the future would keep each other in memory, with the caller's tensors


def _result(found: Received | LinkLostError) -> Received:
    """Raises the exception that it is."""
    if isinstance(found, LinkLostError):
        raise LinkLostError(str(found), failed=found.failed, ending=found.ending)
    if isinstance(found.body, Failure):
        raise found.body.error()
    return found
