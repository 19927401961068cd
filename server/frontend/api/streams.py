"""Responses that are computed in parts, each by a request to the replicas that keep the state between them.

`StreamRoute` serves pipelines in Python whose last stage yields: see `models/stages/streams.py`. `generate` serves decoders.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette import requests
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from torch import Tensor

from multiworld_serving.common.service.errors import RequestRejected, SessionLostError, StageError, WithdrawnError
from multiworld_serving.common.service.predictor import Prediction
from multiworld_serving.models.generate.decoder import LOST
from multiworld_serving.models.stages import api
from multiworld_serving.models.stages.objects import OBJECT_ROWS, ObjectError, StreamStep
from multiworld_serving.models.stages.responses import response_of
from multiworld_serving.models.stages.streams import END, WAITING
from multiworld_serving.server.frontend.api.inference import prediction_headers
from multiworld_serving.server.frontend.api.object_route import ObjectRoute, http_response, object_rows, objects_of
from multiworld_serving.server.frontend.http.error_responses import rejection_response
from multiworld_serving.server.frontend.http.open_request import OpenRequest
from multiworld_serving.server.frontend.leaders.pool import LeaderPool
from multiworld_serving.server.frontend.observability.request_records import RequestRecord

logger = logging.getLogger(__name__)

EVENT_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
"""Of server-sent events."""
_NEWLINES = re.compile(r"\r\n|\r|\n")
_END_S = 5.0
_ending: set[asyncio.Task[None]] = set()
"""asyncio itself keeps no reference to tasks."""


async def send_step(pool: LeaderPool, opened: OpenRequest, row: Any, route: tuple[str, ...]) -> tuple[Any, Prediction]:
    """Send a row to the replicas of a route. Returns its result, too. Raises SessionLostError if one of them is gone."""
    rows, record, deadline_s = object_rows([row]), opened.record, opened.deadline_s
    key, name = OBJECT_ROWS.key(rows), record.request_id
    prediction = await pool.predict(rows, key=key, deadline_s=deadline_s, request_id=name, route=route)
    record.version, record.prediction, record.predicted_s = prediction.version, prediction, time.monotonic()
    (found,) = objects_of(prediction)
    return found, prediction


def end_session(pool: LeaderPool, row: Any, route: tuple[str, ...]) -> None:
    """Send this row to the replicas that keep a session, which free it. Nothing waits for it. Empty route: there is no session."""
    if route:
        task = asyncio.create_task(_send_end(pool, object_rows([row]), route))
        _ending.add(task)
        task.add_done_callback(_ending.discard)


async def _send_end(pool: LeaderPool, rows: Tensor, route: tuple[str, ...]) -> None:
    try:
        await pool.predict(rows, deadline_s=time.monotonic() + _END_S, request_id="end-session", route=route)
    except RequestRejected:
        pass  # it is gone, or expires
    except Exception:
        logger.exception("a session cannot be ended; it expires")


class StreamedResponse(Response):
    """Begins with the first part, so that an error before it has a status of its own.

    Args:
        stack: closes the request when the body has ended.
        failure: the part that reports a later error. None: the connection is closed, so that the client sees that the body is incomplete.
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        stack: AsyncExitStack,
        opened: OpenRequest,
        failure: Callable[[RequestRejected], bytes] | None,
        headers: Mapping[str, str] = EVENT_HEADERS,
        status: int = 200,
    ) -> None:
        super().__init__(status_code=status, headers=headers)
        del self.headers["content-length"]
        self._parts, self._stack, self._opened, self._failure = parts, stack, opened, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        started = False
        try:
            async with self._stack, aclosing(self._parts):
                async for part in self._parts:
                    if not started:
                        await send(start)
                        started = True
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except RequestRejected as error:
            if not started:
                raise
            self._opened.record.reason = error.reason
            if self._failure is None or isinstance(error, WithdrawnError):
                return
            await send({"type": "http.response.body", "body": self._failure(error), "more_body": True})
        if not started:
            await send(start)
        await send({"type": "http.response.body", "body": b""})


class StreamRoute(ObjectRoute):
    """As `ObjectRoute`, of a last stage that yields. The first chunk is the result of an ordinary request."""

    async def answer(self, request: requests.Request) -> Response:
        """Send the body to the first stage, and begin the response when there is the first chunk."""
        is_event = "text/event-stream" in request.headers.get("accept", "")
        async with AsyncExitStack() as stack:
            opened = await stack.enter_async_context(self.inference.open_http(request))
            rows, prediction = await self._predicted(opened, request)
            (found,) = objects_of(prediction)
            first = found["chunk"] if isinstance(found, dict) else api.Response()
            head = http_response(first, prediction_headers(prediction))
            if is_event:
                head.headers.update(EVENT_HEADERS)
            elif not isinstance(first, str | bytes | api.Response):
                head.headers["Content-Type"] = "application/x-ndjson"
            parts = self._parts(opened, rows, prediction, partial(_part, is_event=is_event))
            failure = partial(_failure, opened.record) if is_event else None
            return StreamedResponse(parts, stack.pop_all(), opened, failure, head.headers, head.status_code)
        raise AssertionError("the block returns or raises")

    def _object(self, row: api.Request) -> Any:
        return StreamStep(uuid.uuid4().hex, "open", 0, 2 * self.inference.gate.limits.timeout_s, row)

    async def _parts(
        self, opened: OpenRequest, rows: Tensor, prediction: Prediction, part_of: Callable[[Any], bytes]
    ) -> AsyncGenerator[bytes, None]:
        """The parts of the body. Closing the iterator ends the stream at its worker.

        Raises:
            SessionLostError: the worker was lost, and the stage cannot resume.
            RequestRejected: the stream cannot be continued.
        """
        pool, resumes, sent = self.inference.gate.pipeline, self.pipeline.stages[-1].resumes, []
        (opening,), (found,) = OBJECT_ROWS.decoded(rows), objects_of(prediction)
        step = replace(opening, action="next", row=None)
        opening = opening if resumes else step
        opened.hold(rows.nbytes if resumes else 0)
        del rows
        try:
            while found != END:
                if isinstance(found, dict) and "chunk" in found:
                    part, step = part_of(found["chunk"]), replace(step, position=step.position + 1)
                    if resumes:
                        opened.hold(len(part))
                        sent.append(found["chunk"])
                    opened.prolong()
                    yield part
                elif found != WAITING:
                    why = found.get("error") if isinstance(found, dict) else None
                    raise StageError(why or f"the last stage returned {found!r:.50} for a step of a stream")
                try:
                    found, prediction = await send_step(pool, opened, step, prediction.route[-1:])
                    if found == LOST:
                        raise SessionLostError("the worker does not have the stream any more")
                except SessionLostError:
                    if not resumes:
                        raise
                    logger.info("request_id=%s is resumed after %d chunks", opened.record.request_id, len(sent))
                    opening = replace(opening, position=len(sent), sent=sent)
                    found, prediction = await send_step(pool, opened, opening, ())
        finally:
            end_session(pool, replace(step, action="close"), prediction.route[-1:])


def _failure(record: RequestRecord, error: RequestRejected) -> bytes:
    return b"event: error\ndata: " + bytes(rejection_response(error, record).body) + b"\n\n"


def _part(chunk: Any, *, is_event: bool) -> bytes:
    """A chunk as a server-sent event, or as a part of a body, where JSON is a line. Raises StageError."""
    try:
        body = response_of(chunk).body
        if is_event:
            return "".join(f"data: {line}\n" for line in _NEWLINES.split(str(body, "utf-8"))).encode() + b"\n"
    except (ObjectError, UnicodeDecodeError) as error:
        raise StageError(f"a chunk cannot be sent: {error}") from error
    return body if isinstance(chunk, str | bytes | api.Response) else body + b"\n"
