"""The verbs of the admin port: rolling restart, and Triton's model repository extension."""

import asyncio
import json

import httpx
import pytest

from multiworld_serving.common.service.administration import (
    InvalidWeightsError,
    OperationInProgressError,
    RestartFailedError,
    VersionFailedError,
)
from multiworld_serving.common.service.predictor import ModelVersion, RestartStep
from multiworld_serving.server.frontend.api.app import Application, create_admin_app
from multiworld_serving.server.frontend.api.groups import ModelGroups
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics
from tests.unit.server.frontend_app import Repository, client_of, group_of
from tests.unit.server.http_port import http_port

RESTART = "/admin/rolling-restart"
LOAD, UNLOAD = "/v2/repository/models/m/load", "/v2/repository/models/m/unload"


def admin_app(repository: Repository) -> Application:
    metrics = FrontendMetrics()
    return create_admin_app(metrics.scrape, ModelGroups(group_of(repository, metrics, name="m")))


def client(repository: Repository) -> httpx.AsyncClient:
    return client_of(admin_app(repository))


STEPS = (
    RestartStep("w", "s0.r0", "restarting", 1, 1),
    RestartStep("w", "s0.r0", "restarted", 1, 1, 0.5, 2.5),
)


@pytest.mark.parametrize(
    ("steps", "states", "restarted"),
    [
        (STEPS, ["restarting", "restarted", "done"], 1),
        ((OperationInProgressError("one is under way"),), ["failed"], 0),
        ((*STEPS, RestartFailedError("x did not come back")), ["restarting", "restarted", "failed"], 1),
    ],
)
async def test_restart_reports_each_step_and_its_end(
    steps: tuple[RestartStep | Exception, ...], states: list[str], restarted: int
) -> None:
    async with client(Repository(steps=steps)) as operations:
        response = await operations.post(RESTART, json={})
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert ([line["state"] for line in lines], lines[-1]["restarted"]) == (states, restarted)
    assert ("error" in lines[-1]) == (states[-1] == "failed")
    assert states[-1] != "done" or lines[1]["back_s"] == 2.5


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        (b"", None),
        (b"{}", None),
        (b'{"parameters": {}}', None),
        (b'{"parameters": {"weights": "a/b.pth"}}', "a/b.pth"),
        (b'{"parameters": {"config": "{\\"parameters\\": {\\"weights\\": {\\"string_value\\": \\"x\\"}}}"}}', "x"),
    ],
)
async def test_weights_are_accepted_in_every_place_of_a_load_request(body: bytes, weights: str | None) -> None:
    repository = Repository()
    async with client(repository) as operators:
        response = await operators.post(LOAD, content=body)
    assert response.status_code == 200
    assert repository.loaded == [weights]
    assert response.json() == {"name": "m", "version": "2", "weights": weights or "own"}


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "truncated"),
        (b"[" * 60_000, 400, "Expected `object`"),
        (b'{"parameters": {"weights": 7}}', 400, "Expected `str | null`"),
        (b'{"parameters": {"file:1/model.pt": "eA=="}}', 400, "a path below --weights-dir"),
        (b'{"parameters": {"config": "{"}}', 400, "truncated"),
        (b'{"parameters": {"config": "{\\"parameters\\": 7}"}}', 400, "Expected `object | null`"),
        (b'{"parameters": {"config": "{\\"max_batch_size\\": 3}"}}', 400, "unknown field `max_batch_size`"),
        (b'{"parameters": {"config": "{\\"parameters\\": {\\"max_rows\\": {}}}"}}', 400, "and nothing else"),
        (b" " * 100_000, 413, "send the name of the weights"),
    ],
)
async def test_invalid_load_request_changes_nothing(body: bytes, status: int, says: str) -> None:
    repository = Repository()
    async with client(repository) as operators:
        response = await operators.post(LOAD, content=body)
    assert response.status_code == status
    assert says in response.json()["error"]
    assert repository.loaded == []


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


async def test_load_is_cancelled_when_the_client_disconnects() -> None:
    begun, given_up = asyncio.Event(), asyncio.Event()

    async def load(weights: str | None) -> ModelVersion:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()
        raise AssertionError

    repository = Repository()
    repository.load_version = load  # type: ignore[method-assign]
    async with http_port(app=admin_app(repository)) as port, asyncio.timeout(60):
        client = await port.open()
        await client.say(f"POST {LOAD} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        await begun.wait()
        await client.close()
        await given_up.wait()


@pytest.mark.parametrize(
    ("path", "body", "status", "drained"),
    [
        ("drain", {"host": "b"}, 200, [("b", False)]),
        ("drain", {"host": "b", "undo": True}, 200, [("b", True)]),
        ("drain", {"host": ""}, 400, []),
        ("drain", {"hosts": ["b"]}, 400, []),
        ("upgrade", {}, 400, []),  # no supervisor has started this frontend
    ],
)
async def test_host_is_drained_and_invalid_requests_change_nothing(
    path: str, body: dict[str, object], status: int, drained: list[tuple[str, bool]]
) -> None:
    repository = Repository()
    async with client(repository) as operators:
        response = await operators.post(f"/admin/{path}", json=body)
    assert (response.status_code, repository.drained) == (status, drained)
