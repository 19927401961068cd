"""The routes of the admin port that change the service: models, rolling restart, drained hosts, and Triton's model repository extension.

POST /admin/models                          {"action": "add", "name": "detector", "source": "detector.bundle", "settings": {"stages": "1"}}
POST /admin/rolling-restart
POST /admin/upgrade
POST /admin/drain                           {"host": "b.example", "undo": false}
POST /v2/repository/index
POST /v2/repository/models/{model}/load     {"parameters": {"weights": "random:1"}}, or `config` as sent by Triton's clients
POST /v2/repository/models/{model}/unload
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from multiworld.texts import MAX_HOST_CHARS
from multiworld_serving.common.service.administration import OperationInProgressError, RestartFailedError
from multiworld_serving.common.service.errors import (
    BodyTooLargeError,
    InferenceRequestError,
    MediaTypeError,
    NotReadyError,
)
from multiworld_serving.common.service.model_change import ModelChange
from multiworld_serving.common.service.predictor import RestartStep
from multiworld_serving.server.frontend.api.groups import ModelGroup, ModelGroups
from multiworld_serving.server.frontend.http.open_request import while_connected
from multiworld_serving.server.frontend.http.route import Endpoint, route

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MAX_BODY_BYTES = 64 * 1024
_UPGRADE_S = 1000.0
"""Longer than the supervisor gives a new one to start."""


class _Text(Struct, forbid_unknown_fields=True):
    """A parameter in Triton's configuration."""

    string_value: str | None = None


class _ConfigParameters(Struct, forbid_unknown_fields=True):
    weights: _Text | None = None


class _Config(Struct, forbid_unknown_fields=True):
    """Triton's `config`: the configuration as JSON. It can only name the weights; all else is a setting of the leader."""

    parameters: _ConfigParameters | None = None


class _LoadParameters(Struct, forbid_unknown_fields=True):
    weights: str | None = None
    config: str | None = None
    unload_dependents: bool = False


class _DrainRequest(Struct, forbid_unknown_fields=True):
    """The body of POST /admin/drain."""

    host: Annotated[str, Meta(min_length=1, max_length=MAX_HOST_CHARS)]
    undo: bool = False


class _RepositoryRequest(Struct):
    """The body of a request to the repository."""

    parameters: _LoadParameters | None = None
    ready: bool = False

    @property
    def weights(self) -> str | None:
        """The name of the weights, from `weights` or from `config`. None = the weights of the settings."""
        given = self.parameters or _LoadParameters()
        if given.weights is not None or given.config is None:
            return given.weights
        config = msgspec.json.decode(given.config, type=_Config)
        found = config.parameters and config.parameters.weights
        return found.string_value if found else None


@dataclass(frozen=True)
class AdminRoutes:
    """The routes. `Application` authorizes requests before they arrive here."""

    groups: ModelGroups
    change: Callable[[ModelChange], Awaitable[None]] | None = None
    """Has the supervisor make a change; None without a supervisor."""

    def routes(self) -> list[Route]:
        """The routes, for the application of the admin port."""
        models = "/v2/repository/models/{model}"
        return [
            route("/admin/models", self.change_models, "POST"),
            route("/admin/rolling-restart", self.rolling_restart, "POST"),
            route("/admin/upgrade", self.upgrade, "POST"),
            route("/admin/drain", self.drain, "POST"),
            route("/v2/repository/index", _json_endpoint(self._index), "POST"),
            route(f"{models}/load", _json_endpoint(self._load), "POST"),
            route(f"{models}/unload", _json_endpoint(self._unload), "POST"),
        ]

    async def rolling_restart(self, request: Request) -> Response:
        """Restart every worker in turn. The response is one JSON object per line, sent as it happens; the last is the outcome.

        If the client disconnects, the restart stops after the current worker.
        """
        _check_json(request)
        model = request.query_params.get("model")
        chosen = list(self.groups) if model is None else self.groups.matching(model)
        return StreamingResponse(_lines(_restarts(chosen)), media_type="application/x-ndjson")

    async def drain(self, request: Request) -> Response:
        """Drain a host, or use it again: for all models, one after another."""
        asked = await _decoded(request, _DrainRequest, "the name of a host, as `host`")
        for group in self.groups:
            await group.pool.drain(asked.host, undo=asked.undo)
        return JSONResponse({})

    async def change_models(self, request: Request) -> Response:
        """Have the supervisor add or remove a model, or divide its requests. The change continues if the client disconnects."""
        return await self._request(await _decoded(request, ModelChange, "action, name, and source of a model"))

    async def upgrade(self, request: Request) -> Response:
        """Have a new supervisor take the place of this one. It continues if the client disconnects."""
        _check_json(request)
        return await self._request(ModelChange("upgrade", timeout_s=_UPGRADE_S))

    async def _request(self, change: ModelChange) -> Response:
        if self.change is None:
            raise InferenceRequestError(
                "this frontend was not started by `multiworld serve`: start, stop and upgrade its programs one at a time"
            )
        await self.change(change)
        return JSONResponse({}, headers={} if change.action == "share" else {"Connection": "close"})  # others serve now

    async def _index(self, request: Request, body: _RepositoryRequest) -> object:
        return self.groups.index(only_ready=body.ready)

    async def _load(self, request: Request, body: _RepositoryRequest) -> object:
        """Load a version; responds when only the new version serves. Triton's response is empty; its clients ignore the content.

        The load is cancelled if the client disconnects.
        """
        group = self.groups.one(request.path_params["model"])
        version = await while_connected(request.receive, group.pool.load_version(body.weights))
        return {"name": group.name, "version": str(version.number), "weights": version.name}

    async def _unload(self, request: Request, body: _RepositoryRequest) -> object:
        await self.groups.one(request.path_params["model"]).pool.unload()
        return {}


async def _restarts(groups: Sequence[ModelGroup]) -> AsyncGenerator[RestartStep, None]:
    """Restart the workers of these models, one model after another."""
    for group in groups:
        async with aclosing(group.pool.restart_workers()) as steps:
            async for step in steps:
                yield step


async def _lines(steps: AsyncGenerator[RestartStep, None]) -> AsyncGenerator[bytes, None]:
    done = 0
    try:
        async with aclosing(steps) as running:
            async for step in running:
                logger.info("rolling restart: %s", step)
                done += step.state == "restarted"
                yield msgspec.json.encode(step) + b"\n"
    except (NotReadyError, OperationInProgressError, RestartFailedError) as error:
        logger.warning("rolling restart: %s", error)
        yield msgspec.json.encode({"state": "failed", "restarted": done, "error": str(error)}) + b"\n"
    else:
        yield msgspec.json.encode({"state": "done", "restarted": done}) + b"\n"


def _json_endpoint(handler: Callable[[Request, _RepositoryRequest], Awaitable[object]]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        try:
            body = msgspec.json.decode(await _read(request), type=_RepositoryRequest)
            return JSONResponse(await handler(request, body))
        except msgspec.MsgspecError as error:
            says = (
                "send the name of a version as `weights`: random:SEED, or a path below --weights-dir. "
                "`config` may contain parameters.weights.string_value and nothing else"
            )
            raise InferenceRequestError(f"the body is invalid ({error}); {says}") from error

    return endpoint


def _check_json(request: Request) -> None:
    """CSRF: another site's page in a browser can post a form to this machine, but not JSON without a CORS preflight."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise MediaTypeError("the content type is not application/json; send Content-Type: application/json")


async def _decoded(request: Request, kind: type[T], expected: str) -> T:
    _check_json(request)
    try:
        return msgspec.json.decode(await _read(request), type=kind)
    except msgspec.MsgspecError as error:
        raise InferenceRequestError(f"the body is invalid: {error}; send {expected}") from error


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise BodyTooLargeError(
                f"the body is larger than {_MAX_BODY_BYTES} bytes; send the name of the weights, not the weights"
            )
    return bytes(body) or b"{}"
