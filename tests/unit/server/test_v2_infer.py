"""Successful requests to POST /v2/models/{model}/infer."""

import base64
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch

from multiworld_serving.common.service.predictor import ModelVersion, Prediction
from multiworld_serving.server.frontend.api.oip.infer_response import HEADER_LENGTH
from tests.unit.server.frontend_app import MODEL, SIDE, ColourPredictor, RunningFrontend, image_bytes, running_frontend
from tests.unit.server.v2_requests import (
    INFER,
    PACK,
    binary_tensor,
    elements,
    parts,
    pixels,
    request,
    strongest,
    tensor,
    wanting,
)

TWO = pixels("green", "blue")
SHAPE = list(TWO.shape)
FLOATS = TWO.float() / 255
FILES = [image_bytes("green", file_format="JPEG"), image_bytes("blue", file_format="WEBP")]
TEXTS = [base64.b64encode(file).decode() for file in FILES]

REQUESTS: dict[str, dict[str, Any]] = {
    "UINT8 flat": request(tensor("UINT8", SHAPE, data=TWO.flatten().tolist())),
    "UINT8 nested": request(tensor("UINT8", SHAPE, data=TWO.tolist())),
    "UINT8 binary": request(binary_tensor("UINT8", SHAPE, TWO.numpy().tobytes())),
    "FP32 flat": request(tensor("FP32", SHAPE, data=FLOATS.flatten().tolist())),
    "FP32 binary": request(binary_tensor("FP32", SHAPE, FLOATS.numpy().tobytes())),
    "BYTES as base64": request(tensor("BYTES", [2], data=TEXTS)),
    "BYTES nested": request(tensor("BYTES", [2, 1], data=[[text] for text in TEXTS])),
    "BYTES binary": request(binary_tensor("BYTES", [2, 1], elements(*FILES))),
    "an empty list of outputs": request(tensor("BYTES", [2], data=TEXTS), outputs=[]),
    "unknown fields": request(
        tensor("BYTES", [2], data=TEXTS), model_name="x", parameters={"priority": 3, "mine": "x"}
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_infer_answers_images_in_order_in_every_format(frontend: RunningFrontend, name: str) -> None:
    response = await frontend.client.post(INFER, **REQUESTS[name])
    assert strongest(response) == ["green", "blue"]
    versioned = f"/v2/models/{MODEL.name}/versions/1/infer"
    assert strongest(await frontend.client.post(versioned, **REQUESTS[name])) == ["green", "blue"]
    head, _ = parts(response)
    assert (head["model_name"], head["model_version"], "id" in head) == (MODEL.name, "1", False)
    assert response.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("fields", "binary"),
    [
        ({}, False),
        ({"parameters": {"binary_data_output": True}}, True),
        ({"outputs": wanting(binary_data=True)}, True),
        ({"outputs": wanting(), "parameters": {"binary_data_output": True}}, True),
        ({"outputs": wanting(binary_data=False), "parameters": {"binary_data_output": True}}, False),
    ],
)
async def test_infer_answers_in_binary_on_request(
    frontend: RunningFrontend, fields: dict[str, Any], binary: bool
) -> None:
    response = await frontend.client.post(INFER, **request(tensor("BYTES", [2], data=TEXTS), **fields))
    assert (HEADER_LENGTH in response.headers) is binary
    assert response.headers["Content-Type"] == ("application/octet-stream" if binary else "application/json")
    assert strongest(response) == ["green", "blue"]


@pytest.mark.parametrize(("classes", "answered"), [(1, 1), (3, 3), (99, 3)])
async def test_infer_returns_the_best_classes_with_value_index_and_label(
    frontend: RunningFrontend, classes: int, answered: int
) -> None:
    given = tensor("BYTES", [2], data=TEXTS)
    plain = (await frontend.client.post(INFER, **request(given))).json()["outputs"][0]
    heads = []
    for binary in (False, True):
        outputs = wanting(classification=classes, binary_data=binary)
        head, data = parts(await frontend.client.post(INFER, **request(given, outputs=outputs)))
        heads += head["outputs"]
    assert [(head["datatype"], head["shape"]) for head in heads] == [("BYTES", [2, answered])] * 2
    texts = heads[0]["data"]
    assert data == elements(*(text.encode() for text in texts))
    values, indices, labels = zip(*(text.split(":") for text in texts), strict=True)
    assert (indices[0], labels[0], indices[answered], labels[answered]) == ("1", "green", "2", "blue")
    expected = torch.tensor(plain["data"]).view(2, 3).topk(answered).values.flatten().tolist()
    assert [float(value) for value in values] == pytest.approx(expected, rel=1e-8)


async def test_infer_rounds_floats_to_the_nearest_gray_level() -> None:
    levels = torch.arange(256).float().repeat(3)
    image = (levels / 255).view(1, 3, SIDE, SIDE)
    seen: list[torch.Tensor] = []

    def look(rows: torch.Tensor) -> Prediction:
        seen.extend(rows)
        return Prediction(torch.ones(len(rows), 3) / 3, MODEL.name, MODEL.version, 0, 0, 0, 1, ())

    async with running_frontend(ColourPredictor(answer=look)) as frontend:
        for noise in (-0.001, 0.0, 0.001):  # less than half a level, and beyond 0..1 at both ends
            data = (image + noise).numpy().tobytes()
            response = await frontend.client.post(INFER, **request(binary_tensor("FP32", list(image.shape), data)))
            assert response.status_code == 200, response.text
    for found in seen:
        assert torch.equal(found.flatten().float(), levels)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "GZIP", "identity"])
async def test_infer_decompresses_the_body(frontend: RunningFrontend, encoding: str) -> None:
    arguments = request(binary_tensor("UINT8", SHAPE, TWO.numpy().tobytes()))
    pack = PACK.get(encoding.lower(), bytes)
    arguments["content"] = pack(arguments["content"])
    arguments["headers"]["Content-Encoding"] = encoding
    assert strongest(await frontend.client.post(INFER, **arguments)) == ["green", "blue"]


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("br, deflate;q=0.5, gzip", "deflate"),
        ("gzip;q=0, deflate", "deflate"),
        ("gzip;q=0.000", None),
        ("*", None),
        ("", None),
    ],
)
async def test_infer_compresses_the_answer_as_accepted(
    frontend: RunningFrontend, accepted: str, encoding: str | None
) -> None:
    arguments = request(tensor("BYTES", [2], data=TEXTS), parameters={"binary_data_output": True})
    response = await frontend.client.post(INFER, **arguments, headers={"Accept-Encoding": accepted})
    assert response.headers.get("Content-Encoding") == encoding
    assert response.headers["Vary"] == "Accept-Encoding"
    assert strongest(response) == ["green", "blue"]


async def test_infer_returns_version_path_attempts_and_id_in_headers(frontend: RunningFrontend) -> None:
    image = tensor("BYTES", [2], data=TEXTS)
    by_body = await frontend.client.post(INFER, **request(image, id="mine-1"))
    by_both = await frontend.client.post(INFER, **request(image, id="mine-2"), headers={"X-Request-Id": "header"})
    strange = await frontend.client.post(INFER, **request(image, id="with space ü"))
    assert by_body.headers["X-Request-Id"] == by_body.json()["id"] == "mine-1"
    assert (by_both.headers["X-Request-Id"], by_both.json()["id"]) == ("header", "mine-2")
    assert strange.json()["id"] == "with space ü"
    assert len(strange.headers["X-Request-Id"]) == 32
    assert frontend.predictor.request_ids == ["mine-1", "header", strange.headers["X-Request-Id"]]
    assert (by_body.headers["X-Path"], by_body.headers["X-Attempts"]) == ("stage0-0,stage1-1", "2")


@pytest.mark.parametrize(
    ("timeout_us", "header", "expected_s"),
    [
        (None, {}, 20.0),
        (None, {"X-Request-Timeout-S": "5"}, 5.0),
        (99_000_000, {}, 20.0),
        (0, {}, 20.0),
        (5_000_000, {"X-Request-Timeout-S": "3"}, 3.0),
        (5_000_000, {"X-Request-Timeout-S": "9"}, 5.0),
    ],
)
async def test_infer_uses_the_timeout_in_microseconds_as_deadline(
    timeout_us: int | None, header: dict[str, str], expected_s: float
) -> None:
    parameters = {} if timeout_us is None else {"timeout": timeout_us}
    async with running_frontend(timeout_s=20.0) as frontend:
        before_s = time.monotonic()
        arguments = request(tensor("BYTES", [2], data=TEXTS), parameters=parameters)
        response = await frontend.client.post(INFER, **arguments, headers=header)
        after_s = time.monotonic()
    assert response.status_code == 200, response.text
    assert all(before_s + expected_s <= at_s <= after_s + expected_s for at_s in frontend.predictor.deadlines_s)


@dataclass
class MovingPredictor(ColourPredictor):
    """Switches to another version after its first answer."""

    number: int = 1

    @property
    def version(self) -> ModelVersion:
        return ModelVersion(self.number, f"weights {self.number}")

    async def predict(self, rows: torch.Tensor, **asked: Any) -> Prediction:
        answer = await super().predict(rows, **asked)
        version, self.number = self.version, 2
        return msgspec.structs.replace(answer, version=version.name, version_number=version.number)


async def test_requested_version_answers_or_the_request_fails() -> None:
    data = pixels("red")
    tensor = binary_tensor("UINT8", list(data.shape), data.numpy().tobytes())
    predictor = MovingPredictor()
    async with running_frontend(predictor) as frontend:
        paths = [f"/v2/models/{MODEL.name}/versions/{number}/infer" for number in (1, 1, 2)]
        answers = [await frontend.client.post(path, **request(tensor)) for path in paths]
    assert [answer.status_code for answer in answers] == [200, 404, 200]
    assert "the only version is '2'" in answers[1].json()["error"]
