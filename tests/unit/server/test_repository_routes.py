"""Triton's model repository extension on the admin port: permissions, inputs, and the response for each outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from multiworld_serving.common.config.keys import KeySet
from multiworld_serving.server.administration import (
    InvalidWeightsError,
    OperationInProgressError,
    RestartStep,
    VersionFailedError,
)
from multiworld_serving.server.api.admin import AdminRoutes
from multiworld_serving.server.api.app import create_admin_app
from multiworld_serving.server.api.repository import RepositoryRoutes
from multiworld_serving.server.auth.authorizer import ApiKeys, Authorizer
from multiworld_serving.server.observability.frontend_metrics import FrontendMetrics
from multiworld_serving.server.predictor import ModelVersion
from multiworld_serving.server.snapshots import PipelineSnapshot

LOAD, UNLOAD = "/v2/repository/models/m/load", "/v2/repository/models/m/unload"


@dataclass
class Repository:
    """Records load requests, and fails on demand."""

    failure: Exception | None = None
    asked: list[str | None] = field(default_factory=list)
    unloaded: bool = False
    loading: str | None = None

    async def load(self, weights: str | None) -> ModelVersion:
        self.asked.append(weights)
        if self.failure is not None:
            raise self.failure
        return ModelVersion(2, weights or "own")

    async def unload(self) -> None:
        self.unloaded = True

    def snapshot(self) -> PipelineSnapshot:
        ready = not self.unloaded
        return PipelineSnapshot(
            "m", "v", ready, False, 1.0, 0, 0, (), (), 7, version_loading=self.loading, unloaded=self.unloaded
        )


async def no_restart() -> AsyncGenerator[RestartStep, None]:
    return
    yield


def client(repository: Repository, token: bytes = b"", address: str = "127.0.0.1") -> httpx.AsyncClient:
    routes = RepositoryRoutes(repository.snapshot, repository.load, repository.unload)
    authorizer = Authorizer(ApiKeys(KeySet(), KeySet()), (token,) if token else ())
    app = create_admin_app(FrontendMetrics(), AdminRoutes(no_restart), authorizer, routes)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(address, 1)), base_url="http://operations")


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        (b"", None),
        (b"{}", None),
        (b'{"parameters": {}}', None),
        (b'{"parameters": {"weights": "a/b.pth"}}', "a/b.pth"),
        (b'{"parameters": {"config": "{\\"parameters\\": {\\"weights\\": {\\"string_value\\": \\"x\\"}}}"}}', "x"),
        (b'{"parameters": {"config": "{\\"name\\": \\"m\\", \\"max_batch_size\\": 3}"}}', None),
    ],
)
async def test_weights_are_accepted_in_every_place_of_a_load_request(body: bytes, weights: str | None) -> None:
    repository = Repository()
    async with client(repository) as operators:
        response = await operators.post(LOAD, content=body)
    assert response.status_code == 200
    assert repository.asked == [weights]
    assert response.json() == {"name": "m", "version": "2", "weights": weights or "own"}


@pytest.mark.parametrize(
    ("failure", "status", "reason"),
    [
        (InvalidWeightsError("no such weights"), 400, "invalid_weights"),
        (OperationInProgressError("a restart is under way"), 409, "busy"),
        (VersionFailedError("w cannot serve stage 0"), 500, "version_failed"),
    ],
)
async def test_outcomes_have_a_status_and_a_reason(failure: Exception, status: int, reason: str) -> None:
    async with client(Repository(failure)) as operators:
        response = await operators.post(LOAD, json={})
    assert response.status_code == status
    assert response.json()["reason"] == reason
    assert response.json()["error"] == str(failure)


async def test_other_models_are_unknown() -> None:
    repository = Repository()
    async with client(repository) as operators:
        for path in (LOAD.replace("/m/", "/other/"), UNLOAD.replace("/m/", "/other/")):
            response = await operators.post(path, json={})
            assert (response.status_code, response.json()["reason"]) == (404, "unknown_model")
    assert repository.asked == []
    assert not repository.unloaded


async def test_index_lists_serving_and_loading_versions() -> None:
    repository = Repository(loading="next")
    async with client(repository) as operators:
        index = (await operators.post("/v2/repository/index", json={})).json()
        ready = (await operators.post("/v2/repository/index", json={"ready": True})).json()
        await operators.post(UNLOAD, json={"parameters": {"unload_dependents": False}})
        after = (await operators.post("/v2/repository/index")).json()
    assert index[0] == {"name": "m", "version": "7", "state": "READY", "reason": ""}
    assert index[1] == {"name": "m", "version": "", "state": "LOADING", "reason": "next"}
    assert ready == index[:1]
    assert (after[0]["state"], after[0]["reason"]) == ("UNAVAILABLE", "unloaded")


@pytest.mark.parametrize("path", [LOAD, UNLOAD, "/v2/repository/index"])
async def test_only_administrators_have_access(path: str) -> None:
    repository = Repository()
    async with client(repository, b"s3", "10.0.0.7") as operators:
        assert (await operators.post(path)).status_code == 401
        assert (await operators.post(path, headers={"Authorization": "Bearer s3"})).status_code == 200
    async with client(repository, address="10.0.0.7") as operators:
        assert (await operators.post(path)).status_code == 403
    async with client(repository) as operators:
        assert (await operators.post(path, headers={"Origin": "http://127.0.0.1:8002"})).status_code == 403
        assert (await operators.get(path)).status_code == 405


async def test_load_is_cancelled_when_the_client_disconnects() -> None:
    begun, given_up = asyncio.Event(), asyncio.Event()

    async def load(weights: str | None) -> ModelVersion:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()
        raise AssertionError

    parts = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

    async def receive() -> dict[str, Any]:
        if (part := next(parts, None)) is not None:
            return part
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        pass

    routes = RepositoryRoutes(Repository().snapshot, load, Repository().unload)
    app = create_admin_app(FrontendMetrics(), AdminRoutes(no_restart), None, routes)
    scope = {
        "type": "http",
        "method": "POST",
        "path": LOAD,
        "raw_path": LOAD.encode(),
        "headers": [(b"host", b"operations")],
        "query_string": b"",
        "client": ("127.0.0.1", 1),
        "scheme": "http",
        "server": ("operations", 80),
    }
    async with asyncio.timeout(10):
        await app(scope, receive, send)
    assert given_up.is_set()
