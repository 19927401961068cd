"""Probes, status, metrics and the OpenAPI document."""

import pytest
from starlette.routing import Route

from multiworld_serving.common.service.snapshots import ReplicaState
from multiworld_serving.server.frontend.api.app import create_admin_app
from multiworld_serving.server.frontend.api.groups import ModelGroups
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics
from tests.unit.server.frontend_app import (
    MODEL,
    ColourPredictor,
    Repository,
    RunningFrontend,
    client_of,
    group_of,
    running_frontend,
)

ADMIN = ModelGroups(group_of(Repository(), FrontendMetrics()))


@pytest.mark.parametrize(
    ("states", "draining", "reason", "missing", "says"),
    [
        (("ready", "checking"), False, "not_ready", [1], "stage 1 has no ready replica (checking)"),
        (("absent", "absent"), False, "not_ready", [0, 1], "stage 0 has no ready replica (absent); stage 1"),
        (("ready", "ready"), True, "draining", [], "stopping"),
    ],
)
async def test_service_is_alive_and_says_why_it_is_not_ready(
    states: tuple[ReplicaState, ...], draining: bool, reason: str, missing: list[int], says: str
) -> None:
    model = f"/v2/models/{MODEL.name}"
    async with running_frontend(ColourPredictor(states=states, draining=draining)) as frontend:
        for path in ("/v2/health/ready", f"{model}/ready", f"{model}/versions/1/ready", "/readyz"):
            response = await frontend.client.get(path)
            assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
            assert says in response.json()["error"]
        answer = response.json()
        alive = [await frontend.client.get(path) for path in ("/healthz", "/v2/health/live")]
        [indexed] = (await frontend.client.post("/v2/repository/index")).json()
    assert (answer["ready"], answer["reason"], answer["missing_stages"]) == (False, reason, missing)
    assert [(each.status_code, each.json()) for each in alive] == [(200, {"alive": True}), (200, {"live": True})]
    assert (indexed["name"], indexed["version"], indexed["state"]) == (MODEL.name, "1", "UNAVAILABLE")
    assert says in indexed["reason"]


async def test_openapi_describes_every_route_but_the_files_of_the_status_page(frontend: RunningFrontend) -> None:
    document = (await frontend.client.get("/openapi.json")).json()
    status = (await frontend.client.get("/status")).json()
    routes = [route for route in frontend.app.routes if isinstance(route, Route)]
    served = {(route.path, method) for route in routes for method in (route.methods or set()) - {"HEAD"}}
    documented = {(path, method.upper()) for path, of_path in document["paths"].items() for method in of_path}
    assert documented == {
        (path, method) for path, method in served if not path.startswith(("/status-page/", "/openapi", "/predict/"))
    }
    parameters, schemas = (document["components"][kind] for kind in ("parameters", "schemas"))
    assert parameters["top_k"]["schema"] == {"type": "integer", "minimum": 1, "maximum": 3, "default": 3}
    assert parameters["model"]["schema"]["enum"] == [MODEL.name]
    assert schemas["PipelineSnapshot"]["properties"].keys() == status.keys()


async def test_request_for_the_other_port_is_told_where_it_is() -> None:
    admin = create_admin_app(FrontendMetrics().scrape, ADMIN, http_port=8000)
    async with client_of(admin) as client:
        inference = await client.post("/predict")
        unknown = await client.get("/predic")
    assert (inference.status_code, inference.json()["other_port"]) == (404, 8000)
    assert inference.json()["error"] == "POST /predict does not exist here; it is on the HTTP API, port 8000"
    assert "other_port" not in unknown.json()
    async with running_frontend(admin_port=8002) as frontend:
        admin_path = await frontend.client.post("/admin/rolling-restart", json={})
    assert admin_path.json()["other_port"] == 8002
    assert "the admin port, port 8002" in admin_path.json()["error"]


async def test_request_with_another_method_is_told_which_to_use(frontend: RunningFrontend) -> None:
    answer = await frontend.client.get("/predict")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"] == "GET /predict is not allowed here; use POST"
