"""The outermost ASGI application of both ports: request ids, authorization, records of requests, and responses to exceptions."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multiworld_serving.server.auth.authorizer import Authorizer, Permission
from multiworld_serving.server.errors import ForbiddenError, UnauthenticatedError
from multiworld_serving.server.http.errors import internal_error_response, rejection_response
from multiworld_serving.server.observability.request_observer import RequestObserver
from multiworld_serving.server.observability.request_record import InferenceProtocol, RequestRecord

logger = logging.getLogger(__name__)

_V2_INFER = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/infer")


class RequestMiddleware:
    """Handles everything that does not depend on the route.

    Args:
        permission_for: returns the permission that a path requires.
        observer: of the inference requests; None for the admin port, which has none.
        version: returns the name of the version that serves.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authorizer: Authorizer,
        permission_for: Callable[[str], Permission],
        observer: RequestObserver | None = None,
        version: Callable[[], str] = lambda: "",
    ) -> None:
        self._app = app
        self._authorizer = authorizer
        self._permission_for = permission_for
        self._observer = observer
        self._version = version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._observer is None:
            await self._respond(scope, receive, send, RequestRecord.begin(scope, ""))
            return
        record = self._observer.begin(scope, self._version(), inference_protocol(scope["path"]))
        try:
            await self._respond(scope, receive, send, record)
        except Exception:
            record.status = 500
            raise
        finally:
            self._observer.end(scope, record)

    async def _respond(self, scope: Scope, receive: Receive, send: Send, record: RequestRecord) -> None:
        """Run the application. HEAD runs as GET and drops the body (RFC 9110, section 9.3.2)."""
        started, status = False, record.status
        app: ASGIApp = self._refusal(scope, record) or self._app
        if to_head := scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}

        async def send_with_id(message: Message) -> None:
            nonlocal started, status
            if message["type"] == "http.response.start":
                started, status = True, message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.request_id.encode("ascii"))]
            elif to_head:
                return
            try:
                await send(message)
                if to_head:  # end the response here: the body may be endless
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            except RuntimeError as error:
                # The connection has ended, for example after an invalid request behind this one. uvicorn writes to it, and uvloop
                # raises. A client could fill the log with these tracebacks.
                if "closed" not in str(error):
                    raise

        try:
            await app(scope, receive, send_with_id)
        except Exception:
            record.reason = "internal"
            if started:  # too late for an error response: the server logs the exception and closes the connection
                raise
            logger.exception("request failed request_id=%s path=%s", record.request_id, scope["path"])
            await internal_error_response(record)(scope, receive, send_with_id)
        record.status = status

    def _refusal(self, scope: Scope, record: RequestRecord) -> Response | None:
        """The response to a request that is not authorized; None if it is."""
        permission = self._permission_for(scope["path"])
        try:
            record.key_name = self._authorizer.check(permission, scope)
        except (UnauthenticatedError, ForbiddenError) as rejection:
            response = rejection_response(rejection, record)
            if response.status_code == 401:
                response.headers.append("WWW-Authenticate", 'Bearer realm="multiworld"')
                if permission is Permission.ANY_KEY:  # pages for browsers, which then ask for a password
                    response.headers.append("WWW-Authenticate", 'Basic realm="multiworld: the key as the password"')
            return response
        if permission is Permission.ADMIN:
            fields = {"method": scope["method"], "target": scope["path"][:256], "by": record.key_name}
            logger.info("admin request", extra={**fields, "request_id": record.request_id})
        return None


def inference_protocol(path: str) -> InferenceProtocol | None:
    """The inference protocol of a path; None if it is not inference. Probes and scrapes are not measured."""
    if path == "/predict":
        return "predict"
    return "v2" if _V2_INFER.fullmatch(path) else None
