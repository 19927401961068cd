"""The verbs of the admin port: permissions and responses."""

import json
from collections.abc import AsyncGenerator, Callable

import httpx
import pytest

from multiworld_serving.common.config.keys import KeySet
from multiworld_serving.server.administration import OperationInProgressError, RestartFailedError, RestartStep
from multiworld_serving.server.api.admin import AdminRoutes
from multiworld_serving.server.api.app import create_admin_app
from multiworld_serving.server.auth.authorizer import ApiKeys, Authorizer
from multiworld_serving.server.observability.frontend_metrics import FrontendMetrics

PATH = "/admin/rolling-restart"


async def two_steps() -> AsyncGenerator[RestartStep, None]:
    yield RestartStep("w", "s0.r0", "restarting", 1, 1)
    yield RestartStep("w", "s0.r0", "restarted", 1, 1, 0.5, 2.5)


async def refused() -> AsyncGenerator[RestartStep, None]:
    raise OperationInProgressError("one is under way")
    yield


async def failing() -> AsyncGenerator[RestartStep, None]:
    async for step in two_steps():
        yield step
    raise RestartFailedError("x did not come back")


def client(
    steps: Callable[[], AsyncGenerator[RestartStep, None]], *tokens: bytes, address: str = "127.0.0.1"
) -> httpx.AsyncClient:
    authorizer = Authorizer(ApiKeys(KeySet(), KeySet()), tokens)
    app = create_admin_app(FrontendMetrics(), AdminRoutes(steps), authorizer)
    transport = httpx.ASGITransport(app, client=(address, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://operations")


async def test_restart_reports_each_step_and_its_end() -> None:
    async with client(two_steps) as operations:
        response = await operations.post(PATH, json={})
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["state"] for line in lines] == ["restarting", "restarted", "done"]
    assert lines[1]["back_s"] == 2.5
    assert lines[2]["restarted"] == 1


@pytest.mark.parametrize(("steps", "restarted"), [(refused, 0), (failing, 1)])
async def test_failed_restart_gives_the_reason_in_its_last_line(steps, restarted: int) -> None:  # type: ignore[no-untyped-def]
    async with client(steps) as operations:
        response = await operations.post(PATH, json={})
    last = json.loads(response.text.splitlines()[-1])
    assert (last["state"], last["restarted"]) == ("failed", restarted)
    assert last["error"]


async def test_other_machines_are_refused_without_a_token() -> None:
    async with client(two_steps, address="10.0.0.7") as operations:
        response = await operations.post(PATH, json={})
    assert response.status_code == 403
    assert "--token-file" in response.json()["error"]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("", 401),
        ("Bearer no", 401),
        ("Basic s3", 401),
        ("Bearer s3", 200),
        ("bearer  s3 ", 200),
        ("Bearer former", 200),
    ],
)
@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.7"])
async def test_configured_token_is_required_from_everywhere(header: str, status: int, address: str) -> None:
    async with client(two_steps, b"s3", b"former", address=address) as operations:
        response = await operations.post(PATH, json={}, headers={"Authorization": header} if header else {})
    assert response.status_code == status


async def test_cross_site_browser_requests_are_refused() -> None:
    async with client(two_steps) as operations:
        assert (await operations.post(PATH, data={"a": "b"})).status_code == 415
        assert (await operations.get(PATH)).status_code == 405
        from_a_page = await operations.post(PATH, json={}, headers={"Origin": "http://127.0.0.1:8002"})
        assert (from_a_page.status_code, from_a_page.json()["reason"]) == (403, "forbidden")
