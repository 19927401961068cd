"""The ASGI applications of the HTTP port and of the admin port."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from multiworld_serving.common.config.keys import KeySet
from multiworld_serving.common.metrics import ProgramMetrics
from multiworld_serving.common.service.errors import DrainingError, RequestRejected
from multiworld_serving.common.service.model_change import ModelChange
from multiworld_serving.server.frontend.api.admin_routes import AdminRoutes
from multiworld_serving.server.frontend.api.generate.openai_routes import OpenAiRoutes
from multiworld_serving.server.frontend.api.groups import ModelGroups
from multiworld_serving.server.frontend.api.oip.routes import V2Routes
from multiworld_serving.server.frontend.api.service_routes import (
    Scrape,
    metrics_response,
    openapi_document,
    operations_routes,
    status_page_routes,
)
from multiworld_serving.server.frontend.auth.authorizer import (
    ApiKeys,
    Authorizer,
    Permission,
    admin_port_permission,
    http_port_permission,
    is_admin_path,
    is_inference_path,
)
from multiworld_serving.server.frontend.http.error_responses import (
    INTERNAL_ERROR,
    OtherPort,
    error_response,
    rejection_response,
    routing_response,
)
from multiworld_serving.server.frontend.http.route import Endpoint, route
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics
from multiworld_serving.server.frontend.observability.request_records import (
    InferenceProtocol,
    RequestRecord,
    RequestRecorder,
)

logger = logging.getLogger(__name__)

_V2_INFER = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")
_PREDICT = re.compile(r"/predict(?:/(?P<model>[^/]+))?")


class Application(FastAPI):
    """The application of a port. Handles everything that does not depend on the route: authorization, records, and errors.

    It calls the router without FastAPI's middleware, which would handle exceptions a second time.

    Args:
        permission_for: returns the permission that a path requires.
        groups: the models that serve; None for the admin port, which has no inference requests.
        other_port: the port with the paths that this one does not have.
        document: returns the document of GET /openapi.json; None: there is none.
        inference: the endpoints of POST by protocol. They are called without the router, which takes as long as forming the response.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        *,
        requests: RequestRecorder,
        authorizer: Authorizer | None,
        permission_for: Callable[[str], Permission],
        groups: ModelGroups | None = None,
        other_port: OtherPort | None = None,
        document: Callable[[], dict[str, Any]] | None = None,
        inference: Mapping[InferenceProtocol, Endpoint] = MappingProxyType({}),
    ) -> None:
        self._document = document
        super().__init__(
            routes=[*routes],
            redirect_slashes=False,
            openapi_url="/openapi.json" if document else None,
            docs_url=None,  # this page and the next one load scripts from another site
            redoc_url=None,
        )
        self._requests = requests
        self._authorizer = authorizer or Authorizer(ApiKeys(KeySet(), KeySet()))
        self._permission_for = permission_for
        self._groups = groups
        self._other_port = other_port
        self._inference = inference

    def openapi(self) -> dict[str, Any]:
        """The document, which describes the model that serves now."""
        return self._document() if self._document else super().openapi()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request. Routes of GET also respond to HEAD, and uvicorn sends no body then."""
        if self._groups is not None and (named := self._groups.at_path(scope["path"])) is not None:
            scope["path"] = f"/predict/{named.model}"
        protocol, parameters = (None, {}) if self._groups is None else inference_protocol(scope["path"])
        group = None if self._groups is None else self._groups.find(parameters.get("model"))
        version, counts = ("", None) if group is None else (group.pool.version.name, group.requests)
        record = self._requests.begin(scope, version, protocol, counts)
        started, status = False, record.status

        async def send_with_id(message: Message) -> None:
            nonlocal started, status
            if message["type"] == "http.response.start":
                started, status = True, message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.request_id.encode("ascii"))]
            await send(message)

        try:
            try:
                self._authorize(scope, record)
                endpoint = None if protocol is None or scope["method"] != "POST" else self._inference.get(protocol)
                if endpoint is None:
                    scope["app"] = self  # Starlette then raises HTTPException if there is no route
                    await self.router(scope, receive, send_with_id)
                else:
                    scope["path_params"] = parameters
                    response = await endpoint(Request(scope, receive))
                    await response(scope, receive, send_with_id)
            except Exception as error:
                if started:  # too late for an error response: the server logs the exception and closes the connection
                    record.reason, record.status = "internal", 500
                    raise
                await self._error_response(error, scope, record)(scope, receive, send_with_id)
            except asyncio.CancelledError:
                if started:
                    raise
                # The server has stopped, and uvicorn cancels what is left. It would respond with 500 and plain text.
                rejection = DrainingError(
                    "the server stopped before the response was ready; send the request to another one"
                )
                await rejection_response(rejection, record)(scope, receive, send_with_id)
            record.status = status
        finally:
            self._requests.end(scope, record)

    def _authorize(self, scope: Scope, record: RequestRecord) -> None:
        """Raises UnauthenticatedError or ForbiddenError."""
        permission = self._permission_for(scope["path"])
        record.key_name, record.key_models = self._authorizer.check(permission, scope)
        if permission is Permission.ADMIN:
            fields = {"method": scope["method"], "target": scope["path"][:256], "by": record.key_name}
            logger.info("admin request", extra={**fields, "request_id": record.request_id})

    def _error_response(self, error: Exception, scope: Scope, record: RequestRecord) -> Response:
        if isinstance(error, HTTPException):
            return routing_response(error, scope, record, self._other_port)
        if not isinstance(error, RequestRejected):
            logger.error("request failed request_id=%s path=%s", record.request_id, scope["path"], exc_info=error)
            return error_response(500, INTERNAL_ERROR, "internal", record)
        response = rejection_response(error, record)
        if error.status == 401:
            response.headers.append("WWW-Authenticate", 'Bearer realm="multiworld"')
            if self._permission_for(scope["path"]) is Permission.ANY_KEY:  # browsers then ask for a password
                response.headers.append("WWW-Authenticate", 'Basic realm="multiworld: the key as the password"')
        return response


def inference_protocol(path: str) -> tuple[InferenceProtocol | None, dict[str, str]]:
    """The inference protocol and the parameters of a path. None if it is not inference: probes and scrapes are not measured."""
    if path in ("/v1/completions", "/v1/chat/completions"):
        return "openai", {}
    protocol: InferenceProtocol = "v2" if path.startswith("/v2") else "predict"
    match = (_V2_INFER if protocol == "v2" else _PREDICT).fullmatch(path)
    if match is None:
        return None, {}
    return protocol, {name: value for name, value in match.groupdict().items() if value is not None}


def create_api(
    groups: ModelGroups,
    metrics: FrontendMetrics,
    authorizer: Authorizer | None = None,
    scrape: Scrape | None = None,
    admin_port: int | None = None,
) -> Application:
    """Create the HTTP API.

    Args:
        authorizer: checks permissions; None = no authentication.
        scrape: returns the metrics to serve; None = `metrics` alone.
        admin_port: number of the admin port, for requests that belong there.
    """

    def document() -> dict[str, Any]:
        needs_key = authorizer is not None and bool(authorizer.keys.inference)
        return openapi_document(groups, needs_key=needs_key)

    def endpoints() -> dict[str, str]:
        return {
            f"{method.upper()} {path}": operation["summary"]
            for path, operations in document()["paths"].items()
            for method, operation in operations.items()
        }

    v2 = V2Routes(groups)
    return Application(
        [
            route("/predict", groups.predict, "POST"),
            route("/predict/{model}", groups.predict, "POST"),
            *v2.routes(),
            *OpenAiRoutes(groups, metrics).routes(),
            *operations_routes(groups, scrape or metrics.scrape),
            *status_page_routes(groups, endpoints),
        ],
        requests=metrics.requests,
        authorizer=authorizer,
        permission_for=http_port_permission,
        groups=groups,
        other_port=None if admin_port is None else OtherPort("the admin port", admin_port, is_admin_path),
        document=document,
        inference={"predict": groups.predict, "v2": v2.infer},
    )


_ADMIN_ENDPOINTS = {
    "GET /": "this list; for browsers, the status page with operator actions",
    "GET /events": "state and events as server-sent events",
    "GET /metrics": "Prometheus metrics",
    "POST /admin/models": "add a model to the service, or remove one",
    "POST /admin/drain": "take the workers of a host out of service, or put them back with undo: true",
    "POST /admin/upgrade": "replace all processes by those of the code and settings that are installed now",
    "POST /admin/rolling-restart": "restart all workers in turn; ?model=MODEL restarts those of one model",
    "POST /v2/repository/index": "the versions of all models",
    "POST /v2/repository/models/MODEL/load": "load a version",
    "POST /v2/repository/models/MODEL/unload": "unload the model",
}


def create_admin_app(
    scrape: Scrape,
    groups: ModelGroups,
    authorizer: Authorizer | None = None,
    own: Scrape | None = None,
    http_port: int | None = None,
    change_models: Callable[[ModelChange], Awaitable[None]] | None = None,
) -> Application:
    """Create the application of the admin port: metrics and admin endpoints.

    Args:
        scrape: returns the metrics of all processes.
        own: returns the metrics of this process alone, for `GET /metrics?own=true`.
        http_port: number of the port of the HTTP API, for requests that belong there.
        change_models: see `AdminRoutes`.
    """

    async def metrics(request: Request) -> Response:
        return await metrics_response(own if own is not None and "own" in request.query_params else scrape)

    return Application(
        [
            route("/metrics", metrics),
            *AdminRoutes(groups, change_models).routes(),
            *status_page_routes(groups, lambda: _ADMIN_ENDPOINTS),
        ],
        requests=RequestRecorder(ProgramMetrics()),
        authorizer=authorizer,
        permission_for=admin_port_permission,
        other_port=None if http_port is None else OtherPort("the HTTP API", http_port, is_inference_path),
    )
