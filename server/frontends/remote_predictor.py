"""The pipeline as a frontend sees it: everything asked of the leader, over the link to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from server.errors import DeadlineError, DrainingError
from server.frontends.frames import Frame, FrameLink, Kind
from server.frontends.messages import answer_of, image_payload, refusal_of
from server.predictor import Answer, ModelVersion
from server.request_traces import current_span
from server.under_way import UnderWay

_LATE_S = 0.5
"""The leader itself keeps the deadline, and says better why; this long after it nobody waits for that."""


class RemotePredictor:
    """Implements `server.predictor.Predictor`."""

    def __init__(self, link: FrameLink) -> None:
        self.version = ModelVersion(0, "")
        self.under_way = UnderWay()
        self._link = link
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Frame]] = {}
        self._refusal: Mapping[str, Any] | None = None
        self._lost = False

    @property
    def closed(self) -> bool:
        """Whether there is nothing to be answered any more: the leader is gone, or takes no requests."""
        return self._lost or self._refusal is not None

    async def predict(self, image: Tensor, *, deadline_s: float, request_id: str) -> Answer:
        """See `Predictor.predict`."""
        facts = {"deadline_s": deadline_s, "request_id": request_id, "span": _span()}
        answer = await self._ask(Kind.PREDICT, facts, deadline_s, image_payload(image))
        return answer_of(answer.facts, answer.payload)

    async def check(self, *, deadline_s: float, ahead: int) -> None:
        """See `Predictor.check`."""
        await self._ask(Kind.CHECK, {"deadline_s": deadline_s, "ahead": ahead}, deadline_s)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """See `Predictor.request`."""
        if self._refusal is not None:
            raise refusal_of(self._refusal)
        with self.under_way.one():
            yield

    # -- what the leader says --------------------------------------------------------------------------------------------------

    def on_state(self, facts: Mapping[str, Any]) -> None:
        """See `Kind.STATE`."""
        self.version = ModelVersion(facts["number"], facts["version"])
        self._refusal = facts["refusal"]

    def on_reply(self, frame: Frame) -> None:
        """A question was answered."""
        future = self._asked.pop(frame.number, None)
        if future is None or future.done():
            return
        if frame.kind is Kind.REFUSED:
            future.set_exception(refusal_of(frame.facts))
        else:
            future.set_result(frame)

    def on_lost(self) -> None:
        """The leader is gone."""
        self._lost = True
        for future in self._asked.values():
            if not future.done():
                future.set_exception(_gone())

    async def _ask(
        self, kind: Kind, facts: Mapping[str, Any], deadline_s: float, payload: memoryview | bytes = b""
    ) -> Frame:
        if self._lost:
            raise _gone()
        number = next(self._numbers)
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self._link.send(kind, number, facts, payload)
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic()) + _LATE_S):
                return await future
        except TimeoutError as error:
            raise DeadlineError("the leader did not answer by the deadline; try again") from error
        finally:
            if self._asked.pop(number, None) is not None and not self._lost:  # nobody has answered
                self._link.send(Kind.CANCEL, number)


def _gone() -> DrainingError:
    return DrainingError("the leader of this service is gone; send the request again")


def _span() -> tuple[int, int] | None:
    """The span that this request is to be seen below, as W3C's Trace Context names it."""
    span = current_span.get()
    if span is None:
        return None
    context = span.get_span_context()
    return (context.trace_id, context.span_id)
