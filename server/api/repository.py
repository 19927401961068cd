"""Triton's model repository extension: list versions, load another version, unload the model. On the admin port.

POST /v2/repository/index
POST /v2/repository/models/{model}/load     {"parameters": {"weights": "random:1"}}, or `config` as sent by Triton's clients
POST /v2/repository/models/{model}/unload
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from multiworld_serving.server.administration import InvalidWeightsError, OperationInProgressError, VersionFailedError
from multiworld_serving.server.api.oip.metadata import repository_index
from multiworld_serving.server.errors import BodyTooLargeError, InferenceRequestError, UnknownModelError
from multiworld_serving.server.http.errors import error_response
from multiworld_serving.server.http.open_request import while_connected
from multiworld_serving.server.observability.request_record import RequestRecord
from multiworld_serving.server.predictor import ModelVersion
from multiworld_serving.server.snapshots import PipelineSnapshot

_MAX_BODY_BYTES = 64 * 1024


_REASONS: dict[type[Exception], tuple[int, str]] = {
    InvalidWeightsError: (400, "invalid_weights"),
    OperationInProgressError: (409, "busy"),
    VersionFailedError: (500, "version_failed"),
}


@dataclass(frozen=True)
class RepositoryRoutes:
    """The routes of the extension. `RequestMiddleware` authorizes requests before they arrive here."""

    snapshot: Callable[[], PipelineSnapshot]
    load_version: Callable[[str | None], Awaitable[ModelVersion]]
    unload_model: Callable[[], Awaitable[None]]

    def routes(self) -> list[Route]:
        """The routes, for the application of the admin port."""
        models = "/v2/repository/models/{model}"
        return [
            Route("/v2/repository/index", self._json_endpoint(self._index), methods=["POST"]),
            Route(f"{models}/load", self._json_endpoint(self._load), methods=["POST"]),
            Route(f"{models}/unload", self._json_endpoint(self._unload), methods=["POST"]),
        ]

    def _json_endpoint(
        self, handler: Callable[[Request, Mapping[str, Any]], Awaitable[object]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                return JSONResponse(await handler(request, await _body(request)))
            except tuple(_REASONS) as error:
                status, reason = next(found for kind, found in _REASONS.items() if isinstance(error, kind))
                return error_response(status, str(error), reason, RequestRecord.of(request.scope))

        return endpoint

    async def _index(self, request: Request, body: Mapping[str, Any]) -> object:
        return repository_index(self.snapshot(), only_ready=body.get("ready") is True)

    async def _load(self, request: Request, body: Mapping[str, Any]) -> object:
        """Load a version; responds when only the new version serves. Triton's response is empty; its clients ignore the content.

        The load is cancelled if the client disconnects.
        """
        self._check_model(request)
        weights = _weights(_object(body.get("parameters"), "parameters"))
        version = await while_connected(request.receive, self.load_version(weights))
        return {"name": self.snapshot().model, "version": str(version.number), "weights": version.name}

    async def _unload(self, request: Request, body: Mapping[str, Any]) -> object:
        self._check_model(request)
        await self.unload_model()
        return {}

    def _check_model(self, request: Request) -> None:
        name, served = request.path_params["model"], self.snapshot().model
        if name != served:
            raise UnknownModelError(f"there is no model {name[:64]!r}; the only model is {served!r}")


async def _body(request: Request) -> Mapping[str, Any]:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise BodyTooLargeError(
                f"the body is larger than {_MAX_BODY_BYTES} bytes; send the name of the weights, not the weights"
            )
    try:
        return _object(json.loads(body or b"{}"), "body")
    except (ValueError, RecursionError) as error:
        raise InferenceRequestError(f"the body is not valid JSON ({error})") from error


def _weights(parameters: Mapping[str, Any]) -> str | None:
    """The name of the weights, from `weights` or from Triton's `config`. None = the weights of the settings."""
    for name in parameters:
        if name not in ("weights", "config", "unload_dependents"):
            raise InferenceRequestError(
                f"the parameter {name[:64]!r} is not supported; put files below --weights-dir and send their name as `weights`"
            )
    found = parameters.get("weights")
    if found is None and "config" in parameters:
        found = _weights_of_config(parameters["config"])
    if found is not None and not isinstance(found, str):
        raise InferenceRequestError(
            "`weights` must be a string: random:SEED, a published name, or a path below --weights-dir"
        )
    return found


def _weights_of_config(config: object) -> object:
    if not isinstance(config, str):
        raise InferenceRequestError("the parameter `config` must be a string, the configuration as JSON")
    try:
        read = _object(json.loads(config), "parameter `config`")
    except (ValueError, RecursionError) as error:
        raise InferenceRequestError(f"the parameter `config` is not valid JSON ({error})") from error
    return _object(_object(read.get("parameters"), "config's parameters").get("weights"), "weights").get("string_value")


def _object(value: object, what: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InferenceRequestError(f"the {what} must be a JSON object")
    return value
