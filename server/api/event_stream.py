"""The response of GET /events: server-sent events until the client disconnects, is too slow, or the service stops."""

from __future__ import annotations

import asyncio
import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from multiworld_serving.server.observability.event_feed import EventFeed, Subscription
from multiworld_serving.server.predictor import Pipeline

logger = logging.getLogger(__name__)

_STALLED_S = 10.0
"""A client that reads nothing for this long is disconnected."""

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # otherwise nginx buffers the events
}


class EventStream(Response):
    """A response of server-sent events. Starlette's StreamingResponse would wait for a slow client forever.

    Args:
        last_id: id of the last event that the client received.
    """

    def __init__(self, feed: EventFeed, predictor: Pipeline, last_id: int) -> None:
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
                logger.warning("disconnecting a client of /events that read nothing for %g s", _STALLED_S)
            finally:
                gone.cancel()


async def _end_when_gone(receive: Receive, subscription: Subscription) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    subscription.end()
