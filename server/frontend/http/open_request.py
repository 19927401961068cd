"""One inference request from its first byte to its response: its body, its deadline, and whether its client is still connected."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from io import BytesIO
from types import TracebackType
from typing import Self, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from multiworld_serving.common.service.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    DeadlineError,
    InvalidBodyError,
    OverloadedError,
    RequestRejected,
    WithdrawnError,
)
from multiworld_serving.server.frontend.http.limits import RequestLimits
from multiworld_serving.server.frontend.http.route import header
from multiworld_serving.server.frontend.leaders.pool import LeaderPool
from multiworld_serving.server.frontend.observability.request_records import RequestRecord

T = TypeVar("T")

DEADLINE_GRACE_S = 0.5
"""The pipeline enforces the deadline with a more precise error; this is the extra time that it gets to report it."""
_WATCH_AFTER_S = 0.25
"""Age at which a request starts to watch whether its client disconnects. Most requests end earlier, and a task costs CPU time."""


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client disconnects. The body must have been received: the next message is then the disconnect."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects.

    Raises:
        WithdrawnError: the client disconnected.
    """
    working, gone = asyncio.ensure_future(work), asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise WithdrawnError("the client disconnected before the response was ready")
        return await working
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.wait({working})


class RequestGate:
    """What all inference requests of a frontend share: the pipeline, the limits, and the memory for bodies.

    Attributes:
        held_bytes: bytes of all bodies in memory now.
    """

    def __init__(self, pipeline: LeaderPool, limits: RequestLimits) -> None:
        self.pipeline = pipeline
        self.limits = limits
        self.held_bytes = 0
        self.max_held_bytes = max(limits.max_held_bytes, limits.max_body_bytes)


class OpenRequest:
    """Use as `async with`. Cancels the block when the deadline passes or the client disconnects; Starlette does neither.

    Args:
        receive: ASGI receive of the request; None if the server itself cancels this task when the client goes away, as gRPC's does.
        timeout_s: the client's timeout since the request's arrival; None = the server's, which is also the maximum.

    Attributes:
        record: of the request.
        deadline_s: by `time.monotonic()`.
        predicts: whether the pipeline has the request. The block sets it.

    Raises:
        WithdrawnError: the client disconnected.
        DeadlineError: the deadline passed.
        BodyTimeoutError: the server's timeout passed before the body was received.
    """

    def __init__(
        self, gate: RequestGate, record: RequestRecord, receive: Receive | None, timeout_s: float | None = None
    ) -> None:
        limit_s = gate.limits.timeout_s
        self.deadline_s = record.started_s + min(limit_s, timeout_s or limit_s)
        self._latest_s = math.inf if timeout_s is None else record.started_s + timeout_s
        self.predicts = False
        self._admitted = False
        self._gate = gate
        self.record = record
        self._receive = receive
        self._held_bytes = 0
        self._watch: asyncio.Task[None] | None = None
        self._ended: RequestRejected | None = None
        """Why the block was cancelled."""

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._arm()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        self.release()
        if self.record.predicted_s:
            self.record.output_s = time.monotonic() - self.record.predicted_s
        if self._admitted:
            self._gate.pipeline.end()
        ended = self._ended
        if ended is not None and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ended from error

    async def admit(self) -> None:
        """The body is complete: watch the client from now on, and wait until a leader can be used. See `LeaderPool.admit`."""
        self.record.received_s = time.monotonic()
        await self._gate.pipeline.admit(self.deadline_s)
        self._admitted = True

    async def body(self, request: Request, *, allow_empty: bool = False) -> bytes:
        """Receive the whole body of this request. Its bytes count as held until `release`.

        Raises:
            BodyTooLargeError: the body is larger than the limit; detected from Content-Length if present.
            InvalidBodyError: the body is empty and `allow_empty` is false.
            OverloadedError: bodies fill the memory that is reserved for them.
            WithdrawnError: the client disconnected.
        """
        assert self._receive is not None
        # HTTP allows thousands of leading zeros, int() does not.
        announced = (header(request, b"content-length") or "").lstrip("0")
        if announced.isdecimal():
            self._check_size(int(announced))
            self._check_memory(int(announced))
        body, more = BytesIO(), True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise WithdrawnError("the client disconnected before its body was complete")
            chunk = message.get("body", b"")
            self._check_size(body.tell() + len(chunk))
            self.hold(len(chunk))
            more = message.get("more_body", False)
            if chunk and not more and not body.tell():
                return bytes(chunk)
            body.write(chunk)
        if not body.tell() and not allow_empty:
            raise InvalidBodyError("the body is empty; send an image file in it")
        return body.getvalue()  # no copy

    def hold(self, more_bytes: int) -> None:
        """Count further bytes as held until `release`, such as those of a decompressed body.

        Raises:
            OverloadedError: bodies fill the memory that is reserved for them. Never if no other request holds any.
        """
        self._check_memory(more_bytes)
        self._held_bytes += more_bytes
        self._gate.held_bytes += more_bytes

    def release(self) -> None:
        """The body is not needed any more."""
        self._gate.held_bytes -= self._held_bytes
        self._held_bytes = 0

    def prolong(self) -> None:
        """A part of the response is ready: the server's timeout begins again, up to the deadline that the client has set.

        The client is watched from now on: parts may be ready so often that the timer never ends.
        """
        self.deadline_s = min(self._latest_s, time.monotonic() + self._gate.limits.timeout_s)
        self._timer.cancel()
        self._expire()

    def shorten(self, timeout_s: float) -> None:
        """Use this timeout since the request's arrival if it is shorter."""
        self.deadline_s = min(self.deadline_s, self.record.started_s + timeout_s)
        self._timer.cancel()
        self._arm()

    def _check_size(self, body_bytes: int) -> None:
        limit = self._gate.limits.max_body_bytes
        if body_bytes > limit:
            raise BodyTooLargeError(
                f"the body is larger than the limit of {limit} bytes; send a smaller image or fewer rows, or raise --max-body-bytes"
            )

    def _check_memory(self, more_bytes: int) -> None:
        held_bytes, limit = self._gate.held_bytes, self._gate.max_held_bytes
        if held_bytes > self._held_bytes and held_bytes + more_bytes > limit:
            raise OverloadedError(f"request bodies fill the {limit} bytes reserved for them; try again later")

    @property
    def _end_s(self) -> float:
        return self.deadline_s + (DEADLINE_GRACE_S if self.predicts else 0.0)

    def _arm(self) -> None:
        """Set the timer to the end of the request, or to when its client can be watched."""
        wait_s = max(0.0, self._end_s - time.monotonic())
        if self._receive is not None and self._watch is None:
            wait_s = min(wait_s, _WATCH_AFTER_S)
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._expire)

    def _expire(self) -> None:
        """The timer has ended: watch the client, or cancel the block."""
        if self._receive is not None and self.record.received_s and self._watch is None:
            self._watch = asyncio.create_task(self._end_on_disconnect(self._receive))
        if time.monotonic() < self._end_s:
            self._arm()
        elif self.record.received_s:
            self._end(DeadlineError("the deadline passed before the response was ready; try again"))
        elif self.deadline_s < self.record.started_s + self._gate.limits.timeout_s:
            # The client chose it: sending faster is the wrong advice.
            timeout_s = self.deadline_s - self.record.started_s
            self._end(DeadlineError(f"the client's timeout of {timeout_s:g} s expired before its body was received"))
        else:
            received = f"received only {self._held_bytes} bytes of the body before the request timed out"
            self._end(BodyTimeoutError(f"{received}; send it faster"))

    async def _end_on_disconnect(self, receive: Receive) -> None:
        await wait_for_disconnect(receive)
        self._end(WithdrawnError("the client disconnected before the response was ready"))

    def _end(self, why: RequestRejected) -> None:
        if self._ended is None:
            self._ended = why
            self._task.cancel()
