"""Cancels work when the client disconnects or the deadline passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from multiworld_serving.server.errors import DeadlineError, WithdrawnError

DEADLINE_GRACE_S = 1.0
"""The predictor enforces the deadline with a more precise error; this is the extra time that it gets to report it."""


@asynccontextmanager
async def while_connected(receive: Receive | None, *, deadline_s: float) -> AsyncIterator[None]:
    """Cancel the block when the client disconnects or the deadline passes. Starlette does neither.

    Use it after the request's body was read: the next message from `receive` is then the disconnect.

    Args:
        receive: ASGI receive of the request; None if the server itself cancels this task when the client goes away, as gRPC's does.
        deadline_s: by `time.monotonic()`.
    Raises:
        WithdrawnError: the client disconnected.
        DeadlineError: the deadline passed.
    """
    gone = over = False
    try:
        async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())) as scope:
            if receive is None:
                yield
                return

            def leave(_: asyncio.Task[None]) -> None:
                nonlocal gone
                if not over and not scope.expired():  # a scheduled callback cannot be removed
                    gone = True
                    scope.reschedule(0.0)  # cancels this task, distinguishable from any other cancellation

            watch = asyncio.create_task(_disconnect(receive))
            watch.add_done_callback(leave)
            try:
                yield
            finally:
                over = True
                watch.remove_done_callback(leave)
                watch.cancel()
    except TimeoutError as error:
        if not scope.expired():
            raise
        if gone:
            raise WithdrawnError("the client disconnected before the response was ready") from error
        raise DeadlineError("the deadline passed before the response was ready; try again") from error


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
