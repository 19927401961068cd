"""POST /predict without errors, and its calls to the pipeline."""

from __future__ import annotations

import time

import pytest

from tests.unit.server.frontend_app import MODEL, image_bytes, running_frontend


@pytest.mark.parametrize(
    ("media_type", "file_format"), [("image/jpeg", "JPEG"), ("image/png", "PNG"), ("image/webp", "WEBP")]
)
async def test_predict_answers_an_image_body(media_type: str, file_format: str) -> None:
    async with running_frontend() as frontend:
        body = image_bytes("green", file_format=file_format)
        response = await frontend.client.post("/predict", content=body, headers={"Content-Type": media_type})
    assert response.status_code == 200
    answer = response.json()
    assert answer["predictions"][0]["label"] == "green"
    assert answer["predictions"][0]["class_id"] == 1
    assert answer["model"] == MODEL.name
    assert answer["version"] == MODEL.version


async def test_predict_answers_all_fields_of_a_form() -> None:
    async with running_frontend() as frontend:
        response = await frontend.client.post("/predict", files={"image": ("a.png", image_bytes("red"), "image/png")})
    assert response.status_code == 200
    answer = response.json()
    assert set(answer) == {"id", "model", "version", "predictions", "timings_ms"}
    assert [prediction["label"] for prediction in answer["predictions"]] == ["red", "green", "blue"]
    assert sum(prediction["probability"] for prediction in answer["predictions"]) == pytest.approx(1)
    timings = answer["timings_ms"]
    assert (timings["queue"], timings["compute"], timings["transfer"]) == (1, 2, 3)
    assert timings["total"] >= timings["decode"] > 0


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/predict?topk=1", "unknown query parameter 'topk': expected top_k"),
        ("/predict?top_k=1&zzz", "unknown query parameter 'zzz': expected top_k"),
        ("/v2/models/meancolour/infer?top_k=1", "unknown query parameter 'top_k': expected none"),
    ],
)
async def test_unknown_query_parameter_is_refused(path: str, says: str) -> None:
    async with running_frontend() as frontend:
        response = await frontend.client.post(path, files={"image": image_bytes()})
        await frontend.assert_serves()
    assert (response.status_code, response.json()["reason"]) == (422, "invalid_parameter")
    assert response.json()["error"] == says


async def test_predict_returns_version_path_attempts_and_id_in_headers() -> None:
    async with running_frontend() as frontend:
        response = await frontend.client.post(
            "/predict", files={"image": image_bytes()}, headers={"X-Request-Id": "mine-1"}
        )
    assert response.headers["X-Request-Id"] == response.json()["id"] == frontend.predictor.request_ids[0] == "mine-1"
    assert response.headers["X-Model-Version"] == "weights%20v1%20%C3%BC"
    assert response.headers["X-Model-Digest"] == "0f0f"
    assert response.headers["X-Path"] == "stage0-0,stage1-1"
    assert response.headers["X-Attempts"] == "2"


@pytest.mark.parametrize("given", ["", "with space", "x" * 129, "tab\there"])
async def test_predict_generates_an_id_when_the_given_one_is_invalid(given: str) -> None:
    async with running_frontend() as frontend:
        response = await frontend.client.get("/healthz", headers={"X-Request-Id": given})
        other = await frontend.client.get("/healthz")
    assert response.headers["X-Request-Id"] not in (given, other.headers["X-Request-Id"])
    assert len(response.headers["X-Request-Id"]) == 32


async def test_predict_returns_top_k_classes() -> None:
    async with running_frontend(top_k=2) as frontend:
        by_default = await frontend.client.post("/predict", files={"image": image_bytes()})
        by_query = await frontend.client.post("/predict?top_k=1", files={"image": image_bytes()})
    assert len(by_default.json()["predictions"]) == 2
    assert len(by_query.json()["predictions"]) == 1


@pytest.mark.parametrize(
    ("header", "expected_s"), [({}, 20.0), ({"X-Request-Timeout-S": "5"}, 5.0), ({"X-Request-Timeout-S": "99"}, 20.0)]
)
async def test_timeout_header_can_only_shorten_the_deadline(header: dict[str, str], expected_s: float) -> None:
    async with running_frontend(timeout_s=20.0) as frontend:
        before_s = time.monotonic()
        response = await frontend.client.post("/predict", files={"image": image_bytes()}, headers=header)
        after_s = time.monotonic()
    assert response.status_code == 200
    assert before_s + expected_s <= frontend.predictor.deadlines_s[0] <= after_s + expected_s
