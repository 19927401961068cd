"""The outermost ASGI application of both ports: request ids, authorization, records of requests, and responses to exceptions."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multiworld_serving.server.auth.authorizer import Authorizer, Permission
from multiworld_serving.server.errors import ForbiddenError, UnauthenticatedError
from multiworld_serving.server.http.errors import INTERNAL_ERROR, error_response, rejection_response
from multiworld_serving.server.observability.requests import InferenceProtocol, RequestRecord, Requests

logger = logging.getLogger(__name__)

_V2_INFER = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/infer")


class RequestMiddleware:
    """Handles everything that does not depend on the route.

    Args:
        permission_for: returns the permission that a path requires.
        version: returns the name of the version that serves; None for the admin port, which has no inference requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        requests: Requests,
        authorizer: Authorizer,
        permission_for: Callable[[str], Permission],
        version: Callable[[], str] | None = None,
    ) -> None:
        self._app = app
        self._requests = requests
        self._authorizer = authorizer
        self._permission_for = permission_for
        self._version = version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application. HEAD runs as GET and drops the body (RFC 9110, section 9.3.2)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._version is None:
            record = self._requests.begin(scope, "", None)
        else:
            record = self._requests.begin(scope, self._version(), inference_protocol(scope["path"]))
        app: ASGIApp = self._refusal(scope, record) or self._app
        started, status = False, record.status
        to_head = scope["method"] == "HEAD"

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
            await app({**scope, "method": "GET"} if to_head else scope, receive, send_with_id)
            record.status = status
        except Exception:
            record.status, record.reason = 500, "internal"
            if started:  # too late for an error response: the server logs the exception and closes the connection
                raise
            logger.exception("request failed request_id=%s path=%s", record.request_id, scope["path"])
            await error_response(500, INTERNAL_ERROR, "internal", record)(scope, receive, send_with_id)
        finally:
            self._requests.end(scope, record)

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
