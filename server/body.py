"""Reading request bodies: each bounded in size and time, and all together bounded in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.requests import Request
from starlette.types import Receive

from server.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    DeadlineError,
    InvalidBodyError,
    OverloadedError,
    WithdrawnError,
)

_RETRY_AFTER_S = 1.0


@contextmanager
def shortened(timeout_s: float, *, limit_s: float) -> Iterator[None]:
    """A body that comes too late in this block has missed its client's own deadline, where that is shorter than ours.

    Raises:
        DeadlineError: instead of BodyTimeoutError, which would tell the client to send faster.
    """
    try:
        yield
    except BodyTimeoutError as late:
        if timeout_s >= limit_s:
            raise
        raise DeadlineError(f"the {timeout_s:g} s that the client gives were over before its body was here") from late


class BodyReader:
    """Reads bodies and keeps account of how many bytes of them are held.

    Args:
        max_body_bytes: the longest body.
        max_held_bytes: the sum over all requests; what would pass it is refused. At least `max_body_bytes`.
    """

    def __init__(self, *, max_body_bytes: int, max_held_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max(max_held_bytes, max_body_bytes)
        self._held_bytes = 0

    @property
    def max_body_bytes(self) -> int:
        """The longest body."""
        return self._max_body_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all bodies that are being read or used now."""
        return self._held_bytes

    @asynccontextmanager
    async def read(self, request: Request, *, deadline_s: float, may_be_empty: bool = False) -> AsyncIterator[bytes]:
        """The whole body, counted as held until the block is left.

        Args:
            deadline_s: on the clock of `time.monotonic()`: when the client must have sent everything.
        Raises:
            BodyTooLargeError: longer than `max_body_bytes`: told from the header where it says so, else while reading.
            BodyTimeoutError: the client did not send all of it in time.
            InvalidBodyError: there is nothing in it, and it may not be empty.
            OverloadedError: `max_held_bytes` are held.
            WithdrawnError: the client went away.
        """
        announced = request.headers.get("content-length", "")
        if announced.isdecimal():
            self._check(int(announced), more_bytes=int(announced))
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    await self._fill(body, request.receive)
            except TimeoutError as error:
                raise BodyTimeoutError(
                    f"only {len(body)} bytes of the body came before the request's time was over; send it faster"
                ) from error
            if not body and not may_be_empty:
                raise InvalidBodyError("the body is empty; send an image file in it")
            yield bytes(body)
        finally:
            self._held_bytes -= len(body)

    @contextmanager
    def hold(self, more_bytes: int, *, beside: int) -> Iterator[None]:
        """Count what was made of a body as held too, until the block is left: a compressed body may have become much more.

        Args:
            beside: bytes that are held for the same request already. Alone, a request is never refused.
        Raises:
            OverloadedError: `max_held_bytes` are held.
        """
        if self._held_bytes > beside:
            self._check_held(more_bytes)
        self._held_bytes += more_bytes
        try:
            yield
        finally:
            self._held_bytes -= more_bytes

    async def _fill(self, body: bytearray, receive: Receive) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise WithdrawnError("the client went away before its body was complete")
            chunk = message.get("body", b"")
            self._check(len(body) + len(chunk), more_bytes=len(chunk))
            body += chunk
            self._held_bytes += len(chunk)
            more = message.get("more_body", False)

    def _check(self, body_bytes: int, *, more_bytes: int) -> None:
        if body_bytes > self._max_body_bytes:
            raise BodyTooLargeError(
                f"the body is longer than the limit of {self._max_body_bytes} bytes; send a smaller image"
            )
        self._check_held(more_bytes)

    def _check_held(self, more_bytes: int) -> None:
        if self._held_bytes + more_bytes > self._max_held_bytes:
            raise OverloadedError(
                f"the images being received fill the {self._max_held_bytes} bytes set aside for them; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
