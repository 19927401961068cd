"""Reads request bodies, with limits on the size and time of each body and on the memory of all bodies together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from io import BytesIO

from starlette.requests import Request
from starlette.types import Receive

from multiworld_serving.server.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    DeadlineError,
    InvalidBodyError,
    OverloadedError,
    WithdrawnError,
)

_RETRY_AFTER_S = 1.0


@contextmanager
def translate_body_timeout(timeout_s: float, *, limit_s: float) -> Iterator[None]:
    """Raise DeadlineError instead of BodyTimeoutError when the client's own, shorter timeout expired.

    BodyTimeoutError tells the client to send faster, which is wrong advice if the client chose the timeout.

    Args:
        timeout_s: timeout of this request.
        limit_s: timeout of the server.
    Raises:
        DeadlineError: the body timed out and `timeout_s` is less than `limit_s`.
    """
    try:
        yield
    except BodyTimeoutError as late:
        if timeout_s >= limit_s:
            raise
        raise DeadlineError(f"the client's timeout of {timeout_s:g} s expired before its body was received") from late


class BodyReader:
    """Reads bodies and counts how many of their bytes are in memory.

    Args:
        max_body_bytes: maximum size of one body.
        max_held_bytes: maximum sum over all requests; a request that exceeds it is rejected. At least `max_body_bytes`.
    """

    def __init__(self, *, max_body_bytes: int, max_held_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max(max_held_bytes, max_body_bytes)
        self._held_bytes = 0

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of one body."""
        return self._max_body_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all bodies that are in memory now."""
        return self._held_bytes

    @asynccontextmanager
    async def read(self, request: Request, *, deadline_s: float, allow_empty: bool = False) -> AsyncIterator[bytes]:
        """Read the whole body. Its bytes count as held until the block ends.

        Args:
            deadline_s: time by `time.monotonic()` at which the client must have sent the whole body.
        Raises:
            BodyTooLargeError: the body is larger than `max_body_bytes`; detected from Content-Length if present.
            BodyTimeoutError: the client did not send the whole body in time.
            InvalidBodyError: the body is empty and `allow_empty` is false.
            OverloadedError: `max_held_bytes` are held.
            WithdrawnError: the client disconnected.
        """
        # HTTP allows thousands of leading zeros, int() does not.
        announced = request.headers.get("content-length", "").lstrip("0")
        if announced.isdecimal():
            self._check(int(announced), more_bytes=int(announced))
        body = BytesIO()
        try:
            try:
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    await self._fill(body, request.receive)
            except TimeoutError as error:
                raise BodyTimeoutError(
                    f"received only {body.tell()} bytes of the body before the request timed out; send it faster"
                ) from error
            if not body.tell() and not allow_empty:
                raise InvalidBodyError("the body is empty; send an image file in it")
            yield body.getvalue()  # no copy
        finally:
            self._held_bytes -= body.tell()

    @contextmanager
    def reserve(self, more_bytes: int, *, already_held: int) -> Iterator[None]:
        """Count additional bytes as held until the block ends, such as the decompressed body.

        Args:
            already_held: bytes already held for the same request. If no other request holds bytes, nothing is rejected.
        Raises:
            OverloadedError: `max_held_bytes` are held.
        """
        if self._held_bytes > already_held:
            self._check_held(more_bytes)
        self._held_bytes += more_bytes
        try:
            yield
        finally:
            self._held_bytes -= more_bytes

    async def _fill(self, body: BytesIO, receive: Receive) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise WithdrawnError("the client disconnected before its body was complete")
            chunk = message.get("body", b"")
            self._check(body.tell() + len(chunk), more_bytes=len(chunk))
            body.write(chunk)
            self._held_bytes += len(chunk)
            more = message.get("more_body", False)

    def _check(self, body_bytes: int, *, more_bytes: int) -> None:
        if body_bytes > self._max_body_bytes:
            raise BodyTooLargeError(
                f"the body is larger than the limit of {self._max_body_bytes} bytes; send a smaller image"
            )
        self._check_held(more_bytes)

    def _check_held(self, more_bytes: int) -> None:
        if self._held_bytes + more_bytes > self._max_held_bytes:
            raise OverloadedError(
                f"request bodies fill the {self._max_held_bytes} bytes reserved for them; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
