"""Whether somebody still waits for the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from server.errors import DeadlineError, WithdrawnError

LATE_S = 1.0
"""The predictor itself keeps the deadline, and says better why; this long after it nobody waits for that."""


@asynccontextmanager
async def while_connected(receive: Receive, *, deadline_s: float) -> AsyncIterator[None]:
    """Cancel the block when the client goes away, or when time is up.

    Starlette does neither by itself. To be used when the request's body has been read: what `receive` gives then is the
    disconnect.

    Args:
        receive: of the request.
        deadline_s: on the clock of `time.monotonic()`.
    Raises:
        WithdrawnError: the client went away.
        DeadlineError: time is up.
    """
    gone = over = False
    try:
        async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())) as scope:

            def leave(_: asyncio.Task[None]) -> None:
                nonlocal gone
                if not over and not scope.expired():  # a callback that is due already cannot be taken back
                    gone = True
                    scope.reschedule(0.0)  # the timeout's own way of cancelling this task, and no other cancel's

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
            raise WithdrawnError("the client went away before its answer was there") from error
        raise DeadlineError("the request's time was over before its answer was there; try again") from error


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
