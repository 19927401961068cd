"""Metadata, health and statistics of the Open Inference Protocol."""

from __future__ import annotations

import pytest

from multiworld_serving.server.snapshots import ReplicaState
from tests.unit.server.frontend_app import MODEL, SIDE, ColourPredictor, image_bytes, running_frontend
from tests.unit.server.v2_requests import INFER, binary_tensor, elements, request

HERE = f"/v2/models/{MODEL.name}"


async def test_maximum_images_per_request_fit_into_a_body() -> None:
    async with running_frontend(max_body_bytes=3 * SIDE * SIDE * 5 + 1) as frontend:
        assert (await frontend.client.get(f"{HERE}/config")).json()["max_batch_size"] == 5
        files = request(binary_tensor("BYTES", [6], elements(*[image_bytes("red", (8, 8))] * 6)))
        refused = await frontend.client.post(INFER, **files)
    assert refused.status_code == 400
    assert "expected 1 to 5" in refused.json()["error"]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("other", "the only model is 'meancolour'"),
        ("meancolour/versions/2", "the only version is '1', with the weights"),
        ("meancolour/versions/01", "the only version is '1'"),
        ("meancolour/versions/weights v1 ü", "the only version is '1'"),
        ("%2e%2e", "the only model is 'meancolour'"),
        ("meancolour%00", "the only model is 'meancolour'"),
        ("MEANCOLOUR", "the only model is 'meancolour'"),
        ("m" * 5000, "the only model is 'meancolour'"),
    ],
)
async def test_unknown_models_and_versions_get_404_with_the_known_ones(model: str, says: str) -> None:
    async with running_frontend() as frontend:
        for suffix in ("", "/config", "/stats", "/ready", "/infer"):
            method = "POST" if suffix == "/infer" else "GET"
            response = await frontend.client.request(method, f"/v2/models/{model}{suffix}")
            assert response.status_code == 404
            assert response.json()["reason"] == "unknown_model"
            assert says in response.json()["error"]
            assert len(response.json()["error"]) < 300


@pytest.mark.parametrize(
    ("states", "draining", "says"),
    [(("ready", "loading"), False, "stage 1 has no ready replica"), (("ready", "ready"), True, "stopping")],
)
async def test_ready_is_503_with_the_reason_when_not_serving(
    states: tuple[ReplicaState, ...], draining: bool, says: str
) -> None:
    async with running_frontend(ColourPredictor(states=states, draining=draining)) as frontend:
        for path in ("/v2/health/ready", f"{HERE}/ready", f"{HERE}/versions/1/ready"):
            response = await frontend.client.get(path)
            assert response.status_code == 503
            assert says in response.json()["error"]
            assert response.headers["Retry-After"] == "1"
        assert (await frontend.client.get("/v2/health/live")).status_code == 200
        (model,) = (await frontend.client.post("/v2/repository/index")).json()
        assert (model["name"], model["version"], model["state"]) == (MODEL.name, "1", "UNAVAILABLE")
        assert says in model["reason"]
