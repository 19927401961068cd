"""The outermost layer of the frontend: gives every request its id, measures it once, and lets no exception out."""

from __future__ import annotations

import logging
import re
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http_errors import CLIENT_GONE, internal_error_response
from server.metrics import Metrics, Protocol
from server.predictor import ServedModel
from server.request_record import RequestRecord
from server.v2.statistics import Statistics

logger = logging.getLogger(__name__)

_V2_INFER = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/infer")
_NOT_FOR_THE_MODEL = (404, 405)


class RequestTracker:
    """ASGI middleware; adds a few tens of microseconds."""

    def __init__(self, app: ASGIApp, *, model: ServedModel, metrics: Metrics, statistics: Statistics) -> None:
        self._app = app
        self._model = model
        self._metrics = metrics
        self._statistics = statistics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.begin(scope, self._model.version)
        protocol = _protocol(scope["path"])
        if protocol is None:
            await self._answer(scope, receive, send, record)
            return
        self._metrics.request_started()
        code = CLIENT_GONE  # what stays when this task is cancelled
        try:
            code = await self._answer(scope, receive, send, record)
        except Exception:
            code = 500
            raise
        finally:
            duration_s = time.monotonic() - record.started_s
            if code not in _NOT_FOR_THE_MODEL:
                self._statistics.request_finished(record.inference if code == 200 else None, duration_s)
            self._metrics.request_finished(
                model=self._model.name,
                version=record.version,
                protocol=protocol,
                code=code,
                reason=record.reason if code != CLIENT_GONE else "cancelled",
                duration_s=duration_s,
            )

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> int:
        """Run the application; the status that it answered with."""
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.request_id.encode("ascii"))]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            record.reason = "internal"
            if status:  # too late for an answer: the server logs it and closes the connection
                raise
            logger.exception("request failed request_id=%s path=%s", record.request_id, scope["path"])
            await internal_error_response(record)(scope, receive, send_with_id)
        return status


def _protocol(path: str) -> Protocol | None:
    """Only inference is measured: scrapes and probes would drown what the service level is about."""
    if path == "/predict":
        return "predict"
    return "v2" if _V2_INFER.fullmatch(path) else None
