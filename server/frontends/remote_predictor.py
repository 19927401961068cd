"""The predictor of a frontend: sends images to the leader and receives predictions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from multiworld_serving.server.errors import DeadlineError, DrainingError
from multiworld_serving.server.frontends.frames import Frame, FrameConnection, FrameKind
from multiworld_serving.server.frontends.messages import image_payload, parse_prediction, parse_refusal
from multiworld_serving.server.inflight import InflightTracker
from multiworld_serving.server.observability.request_traces import current_span
from multiworld_serving.server.predictor import ModelVersion, Prediction

_DEADLINE_GRACE_S = 0.5
"""The leader enforces the deadline with a more precise error; this is the extra time that it gets to report it."""


class RemotePredictor:
    """Implements `multiworld_serving.server.predictor.Predictor`."""

    def __init__(self, link: FrameConnection) -> None:
        self.version = ModelVersion(0, "")
        self.inflight = InflightTracker()
        self._connection = link
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Frame]] = {}
        self._refusal: Mapping[str, Any] | None = None
        self._lost = False

    @property
    def closed(self) -> bool:
        """Whether requests cannot be served: the leader rejects them, or the connection to it was lost."""
        return self._lost or self._refusal is not None

    async def predict(self, image: Tensor, *, deadline_s: float, request_id: str) -> Prediction:
        """See `Predictor.predict`."""
        fields = {"deadline_s": deadline_s, "request_id": request_id, "span": _span()}
        reply = await self._ask(FrameKind.PREDICT, fields, deadline_s, image_payload(image))
        return parse_prediction(reply.fields, reply.payload)

    async def check(self, *, deadline_s: float, ahead: int) -> None:
        """See `Predictor.check`."""
        await self._ask(FrameKind.CHECK, {"deadline_s": deadline_s, "ahead": ahead}, deadline_s)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """See `Predictor.request`."""
        if self._refusal is not None:
            raise parse_refusal(self._refusal)
        with self.inflight.track():
            yield

    # -- frames of the leader ----------------------------------------------------------------------------------------------------

    def on_state(self, fields: Mapping[str, Any]) -> None:
        """See `FrameKind.STATE`."""
        self.version = ModelVersion(fields["number"], fields["version"])
        self._refusal = fields["refusal"]

    def on_reply(self, frame: Frame) -> None:
        """Complete the request with this number."""
        future = self._pending.pop(frame.number, None)
        if future is None or future.done():
            return
        if frame.kind is FrameKind.REFUSED:
            future.set_exception(parse_refusal(frame.fields))
        else:
            future.set_result(frame)

    def on_lost(self) -> None:
        """Fail all requests: the connection to the leader was lost."""
        self._lost = True
        for future in self._pending.values():
            if not future.done():
                future.set_exception(leader_lost_error())

    async def _ask(
        self, kind: FrameKind, fields: Mapping[str, Any], deadline_s: float, payload: memoryview | bytes = b""
    ) -> Frame:
        if self._lost:
            raise leader_lost_error()
        number = next(self._numbers)
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic()) + _DEADLINE_GRACE_S):
                await self._connection.wait_writable()
                self._connection.send(kind, number, fields, payload)
                return await future
        except TimeoutError as error:
            raise DeadlineError("the leader did not reply before the deadline; try again") from error
        finally:
            if self._pending.pop(number, None) is not None and not self._lost:  # no reply was received
                self._connection.send(FrameKind.CANCEL, number)


def leader_lost_error() -> DrainingError:
    """The error for requests that only the leader can handle."""
    return DrainingError("the leader of this service is gone; send the request again")


def _span() -> tuple[int, int] | None:
    """Trace id and span id of the current request, the parent of the leader's spans."""
    span = current_span.get()
    if span is None:
        return None
    context = span.get_span_context()
    return (context.trace_id, context.span_id)
