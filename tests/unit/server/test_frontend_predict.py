"""POST /predict without errors, and its calls to the pipeline."""

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
    assert response.json()["predictions"][0]["label"] == "green"


async def test_predict_answers_a_form_with_all_fields_and_headers() -> None:
    async with running_frontend() as frontend:
        form = {"image": ("a.png", image_bytes("red"), "image/png")}
        response = await frontend.client.post("/predict", files=form, headers={"X-Request-Id": "mine-1"})
    assert response.status_code == 200
    answer, headers = response.json(), response.headers
    assert set(answer) == {"id", "model", "version", "predictions", "timings_ms"}
    assert (answer["model"], answer["version"]) == (MODEL.name, MODEL.version)
    assert [(each["class_id"], each["label"]) for each in answer["predictions"]] == [
        (0, "red"),
        (1, "green"),
        (2, "blue"),
    ]
    assert sum(each["probability"] for each in answer["predictions"]) == pytest.approx(1)
    assert headers["X-Request-Id"] == answer["id"] == frontend.predictor.request_ids[0] == "mine-1"
    assert (headers["X-Model-Version"], headers["X-Model-Digest"]) == ("weights%20v1%20%C3%BC", "0f0f")
    assert (headers["X-Path"], headers["X-Attempts"]) == ("stage0-0,stage1-1", "2")
    timings = answer["timings_ms"]
    assert (timings["queue"], timings["compute"], timings["transfer"]) == (1, 2, 3)
    assert timings["total"] >= timings["decode"] > 0


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/predict?topk=1", "unknown query parameter 'topk': expected top_k"),
        ("/predict?top_k=1&zzz", "unknown query parameter 'zzz': expected top_k"),
    ],
)
async def test_unknown_query_parameter_is_refused(path: str, says: str) -> None:
    async with running_frontend() as frontend:
        response = await frontend.client.post(path, files={"image": image_bytes()})
        await frontend.assert_serves()
    assert (response.status_code, response.json()["reason"]) == (422, "invalid_parameter")
    assert response.json()["error"] == says


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
