"""The outermost layer of the frontend: gives every request its id, measures it once, and lets no exception out."""

from __future__ import annotations

import logging
import re
import time
from contextlib import nullcontext

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.accounts import Accounts, RequestOutcome
from server.http_errors import CLIENT_GONE, internal_error_response
from server.metrics import Protocol
from server.predictor import Predictor
from server.request_record import RequestRecord
from server.request_traces import RequestTraces

logger = logging.getLogger(__name__)

_V2_INFER = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/infer")


class RecordStart:
    """ASGI middleware for a port without inference: every request has its id, which its errors tell."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            RequestRecord.begin(scope, "")
        await self._app(scope, receive, send)


class RequestTracker:
    """ASGI middleware; adds a few tens of microseconds."""

    def __init__(
        self, app: ASGIApp, *, predictor: Predictor, accounts: Accounts, traces: RequestTraces | None = None
    ) -> None:
        self._app = app
        self._predictor = predictor
        self._accounts = accounts
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.begin(scope, self._predictor.version.name)
        protocol = inference_protocol(scope["path"])
        if protocol is None:
            await self._answer(scope, receive, send, record)
            return
        with self._traces.request(scope, record) if self._traces else nullcontext():
            await self._measured(scope, receive, send, record, protocol)

    async def _measured(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord, protocol: Protocol
    ) -> None:
        number = self._accounts.request_began(protocol)
        code = CLIENT_GONE  # what stays when this task is cancelled
        try:
            code = await self._answer(scope, receive, send, record)
        except Exception:
            code = 500
            raise
        finally:
            record.status = code
            reason = record.reason if code != CLIENT_GONE else "cancelled"
            times = record.inference.times if record.inference else None
            duration_s = time.monotonic() - record.started_s
            self._accounts.request_ended(
                number, RequestOutcome(record.version, protocol, code, reason, duration_s, times)
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


def inference_protocol(path: str) -> Protocol | None:
    """By which of them a path asks for inference; None when it does not. Only inference is measured: scrapes and probes would drown it."""
    if path == "/predict":
        return "predict"
    return "v2" if _V2_INFER.fullmatch(path) else None
