"""The outermost middleware: assigns request ids, records inference requests, and turns exceptions into responses."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multiworld_serving.common.observers import suppress_errors
from multiworld_serving.server.http.access_log import AccessLog
from multiworld_serving.server.http.errors import CLIENT_CLOSED_REQUEST, internal_error_response
from multiworld_serving.server.observability.request_outcomes import RequestOutcomes
from multiworld_serving.server.observability.request_record import InferenceProtocol, RequestRecord
from multiworld_serving.server.observability.request_traces import RequestTraces
from multiworld_serving.server.predictor import Predictor

logger = logging.getLogger(__name__)

_V2_INFER = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/infer")


class RequestIdMiddleware:
    """ASGI middleware for a port without inference: assigns request ids and turns exceptions into responses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _respond(self._app, scope, receive, send, RequestRecord.begin(scope, ""))
        else:
            await self._app(scope, receive, send)


class RequestObserver:
    """Observes requests over HTTP and gRPC: metrics, traces and the log. Costs some tens of microseconds."""

    def __init__(self, outcomes: RequestOutcomes, traces: RequestTraces | None, log: AccessLog) -> None:
        self._outcomes = outcomes
        self._traces = traces
        self._log = suppress_errors(log.request_ended)

    @contextmanager
    def observe(self, scope: Scope, record: RequestRecord, protocol: InferenceProtocol | None) -> Iterator[None]:
        """Observe one request, which the block answers. The block stores the status of the answer in the record.

        Args:
            protocol: None = not an inference request, which is logged only.
        """
        record.protocol, record.status = protocol, CLIENT_CLOSED_REQUEST  # the status remains if this task is cancelled
        try:
            if protocol is None:
                yield
                return
            with self._traces.request(scope, record) if self._traces else nullcontext():
                yield from self._counted(record)
        finally:
            record.duration_s = record.duration_s or time.monotonic() - record.started_s
            self._log(scope, record)

    def _counted(self, record: RequestRecord) -> Iterator[None]:
        self._outcomes.started()
        try:
            yield
        except Exception:
            record.status = 500
            raise
        finally:
            if record.status == CLIENT_CLOSED_REQUEST:
                record.reason = "cancelled"
            record.duration_s = time.monotonic() - record.started_s
            self._outcomes.ended(record)


class RequestTracker:
    """ASGI middleware that begins the record of each request and observes it."""

    def __init__(self, app: ASGIApp, *, predictor: Predictor, observer: RequestObserver) -> None:
        self._app = app
        self._predictor = predictor
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord.begin(scope, self._predictor.version.name)
        with self._observer.observe(scope, record, inference_protocol(scope["path"])):
            record.status = await _respond(self._app, scope, receive, send, record)


async def _respond(app: ASGIApp, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> int:
    """Run the application and return the response's status. HEAD runs as GET and drops the body (RFC 9110, section 9.3.2)."""
    status = 0
    if to_head := scope["method"] == "HEAD":
        scope = {**scope, "method": "GET"}

    async def send_with_id(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.request_id.encode("ascii"))]
            await _send_if_open(send, message)
            if to_head:  # end the response here: the body may be endless
                await _send_if_open(send, {"type": "http.response.body", "body": b"", "more_body": False})
        elif not to_head:
            await _send_if_open(send, message)

    try:
        await app(scope, receive, send_with_id)
    except Exception:
        record.reason = "internal"
        if status:  # too late for an error response: the server logs the exception and closes the connection
            raise
        logger.exception("request failed request_id=%s path=%s", record.request_id, scope["path"])
        await internal_error_response(record)(scope, receive, send_with_id)
    return status


async def _send_if_open(send: Send, message: Message) -> None:
    """Send, or do nothing if the connection has ended, for example after an invalid request behind this one.

    uvicorn writes to the closed connection then, and uvloop raises. A client could fill the log with these tracebacks.
    """
    try:
        await send(message)
    except RuntimeError as error:
        if "closed" not in str(error):
            raise


def inference_protocol(path: str) -> InferenceProtocol | None:
    """The inference protocol of a path; None if it is not inference. Probes and scrapes are not measured."""
    if path == "/predict":
        return "predict"
    return "v2" if _V2_INFER.fullmatch(path) else None
