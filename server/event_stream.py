"""The answer to GET /events: server-sent events until the reader goes, falls behind, or the service stops."""

from __future__ import annotations

import asyncio
import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.events_feed import EventsFeed, Subscription
from server.predictor import Pipeline

logger = logging.getLogger(__name__)

_STALLED_S = 10.0
"""A reader that takes nothing for so long is dropped."""

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # or nginx would collect events before it passes them on
}


class EventStream(Response):
    """Not Starlette's streaming response: that one waits for a reader for ever.

    Args:
        last_id: the last event that the reader has.
    """

    def __init__(self, feed: EventsFeed, predictor: Pipeline, last_id: int) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._feed = feed
        self._predictor = predictor
        self._last_id = last_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.subscribe(self._predictor.snapshot(), self._last_id) as subscription:
            gone = asyncio.create_task(_end_when_gone(receive, subscription))
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for message in subscription:
                    async with asyncio.timeout(_STALLED_S):
                        await send({"type": "http.response.body", "body": message, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except TimeoutError:
                logger.warning("a reader of /events took nothing for %g s and was dropped", _STALLED_S)
            finally:
                gone.cancel()


async def _end_when_gone(receive: Receive, subscription: Subscription) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    subscription.end()
