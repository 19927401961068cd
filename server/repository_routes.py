"""Triton's model repository extension: what there is, load another version, take the model out of service. For operators only.

POST /v2/repository/index
POST /v2/repository/models/{model}/load     {"parameters": {"weights": "random:1"}}, or `config` as Triton's clients send it
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

from models import ModelError
from server.errors import BodyTooLargeError, InferenceRequestError, UnknownModelError
from server.http_errors import error_response
from server.maintenance import MaintenanceError
from server.predictor import ModelVersion, PipelineSnapshot
from server.request_record import RequestRecord
from server.v2.repository_index import repository_index
from server.version_change import VersionFailedError

_MAX_BODY_BYTES = 64 * 1024


_REASONS: dict[type[Exception], tuple[int, str]] = {
    ModelError: (400, "invalid_weights"),
    MaintenanceError: (409, "busy"),
    VersionFailedError: (500, "version_failed"),
}


@dataclass(frozen=True)
class RepositoryRoutes:
    """What answers the extension; who may ask is checked before (server/access.py)."""

    snapshot: Callable[[], PipelineSnapshot]
    load_version: Callable[[str | None], Awaitable[ModelVersion]]
    unload_model: Callable[[], Awaitable[None]]

    def routes(self) -> list[Route]:
        """For the operators' application."""
        models = "/v2/repository/models/{model}"
        return [
            Route("/v2/repository/index", self._answered(self._index), methods=["POST"]),
            Route(f"{models}/load", self._answered(self._load), methods=["POST"]),
            Route(f"{models}/unload", self._answered(self._unload), methods=["POST"]),
        ]

    def _answered(
        self, answer: Callable[[Request, Mapping[str, Any]], Awaitable[object]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            try:
                return JSONResponse(await answer(request, await _body(request)))
            except tuple(_REASONS) as error:
                status, reason = next(found for kind, found in _REASONS.items() if isinstance(error, kind))
                return error_response(status, str(error), reason, RequestRecord.of(request.scope))

        return answered

    async def _index(self, request: Request, body: Mapping[str, Any]) -> object:
        return repository_index(self.snapshot(), only_ready=body.get("ready") is True)

    async def _load(self, request: Request, body: Mapping[str, Any]) -> object:
        """Answers when the new version serves alone; the answer is not Triton's empty one, which its clients do not mind."""
        self._check_model(request)
        version = await self.load_version(_weights(_object(body.get("parameters"), "parameters")))
        return {"name": self.snapshot().model, "version": str(version.number), "weights": version.name}

    async def _unload(self, request: Request, body: Mapping[str, Any]) -> object:
        self._check_model(request)
        await self.unload_model()
        return {}

    def _check_model(self, request: Request) -> None:
        name, served = request.path_params["model"], self.snapshot().model
        if name != served:
            raise UnknownModelError(f"there is no model {name[:64]!r}; the only one is {served!r}")


async def _body(request: Request) -> Mapping[str, Any]:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise BodyTooLargeError(f"the body is longer than {_MAX_BODY_BYTES} bytes; weights are not sent, but named")
    try:
        return _object(json.loads(body or b"{}"), "body")
    except (ValueError, RecursionError) as error:
        raise InferenceRequestError(f"the body is not valid JSON ({error})") from error


def _weights(parameters: Mapping[str, Any]) -> str | None:
    """The weights that are named: as a parameter of ours, or in a configuration as Triton's clients send it. None = the service's own."""
    for name in parameters:
        if name not in ("weights", "config", "unload_dependents"):
            raise InferenceRequestError(
                f"the parameter {name[:64]!r} is not taken; put files below --weights-dir and name them: weights"
            )
    found = parameters.get("weights")
    if found is None and "config" in parameters:
        found = _of_config(parameters["config"])
    if found is not None and not isinstance(found, str):
        raise InferenceRequestError(
            "`weights` must be a text: random:SEED, a published name, or a path below --weights-dir"
        )
    return found


def _of_config(config: object) -> object:
    if not isinstance(config, str):
        raise InferenceRequestError("the parameter `config` must be a text, the configuration as JSON")
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
