"""Refused inference requests of the Open Inference Protocol: one clear sentence each, and the service continues."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from multiworld_serving.common.service import errors
from multiworld_serving.common.service.predictor import Prediction
from tests.unit.server.frontend_app import (
    MAX_BODY_BYTES,
    MODEL,
    SIDE,
    ColourPredictor,
    RunningFrontend,
    image_bytes,
    running_frontend,
)
from tests.unit.server.v2_requests import INFER, binary_tensor, elements, pixels, request, tensor

ONE = pixels("red")
SHAPE = list(ONE.shape)
VALUES = ONE.flatten().tolist()
DATA = ONE.numpy().tobytes()
GOOD = tensor("UINT8", SHAPE, data=VALUES)
GOOD_BINARY = binary_tensor("UINT8", SHAPE, DATA)
FILE = image_bytes("green", (8, 8))


def floats(*values: float) -> dict[str, Any]:
    """An image of floats that starts with these."""
    data = torch.zeros(1, 3, SIDE, SIDE)
    data.view(-1)[: len(values)] = torch.tensor(values)
    return request(binary_tensor("FP32", SHAPE, data.numpy().tobytes()))


def sent(body: bytes, **headers: str) -> dict[str, Any]:
    return {"content": body, "headers": {name.replace("_", "-"): value for name, value in headers.items()}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not JSON": (sent(b"hello"), "not valid JSON"),
    "deep": (sent(b"[" * 15_000), "not valid JSON"),
    "inputs empty": (sent(b'{"inputs": []}'), "length >= 1"),
    "no inputs": (sent(b'{"input": [1]}'), "field `inputs`; GET /v2/models/meancolour describes the inputs"),
    "unknown input": (request(GOOD | {"name": "image"}), "no input 'image'; the model's only input is 'input'"),
    "input twice": (sent(json.dumps({"inputs": [GOOD, GOOD]}).encode()), "given 2 times"),
    "no batch dimension": (request(GOOD | {"shape": SHAPE[1:]}), "put the batch dimension in front"),
    "channels last": (request(GOOD | {"shape": [1, SIDE, SIDE, 3]}), "put the channels before"),
    "negative shape": (request(GOOD | {"shape": [-1, 3, SIDE, SIDE]}), "has -1 images; expected 1 to 64"),
    "files in three dimensions": (request(tensor("BYTES", [1, 1, 1], data=["x"])), "expected [N] or [N, 1]"),
    "shape for two, data for one": (request(GOOD | {"shape": [2, 3, SIDE, SIDE]}), "it has 768 values, expected 1536"),
    "nested unevenly": (
        request(GOOD | {"data": [[[[0] * 15] * 16] * 3]}),
        "not into lists of 16 everywhere at dimension 3",
    ),
    "data of texts": (request(GOOD | {"data": ["1"] * 768}), "must be whole numbers for UINT8, and has str"),
    "UINT8 of 256": (request(GOOD | {"data": [256] * 768}), "values outside 0 to 255"),
    "FP32 normalised": (floats(-2.1, 2.6), "from -2.1 to 2.6; expected 0 to 1, not normalized"),
    "FP32 NaN": (floats(float("nan")), "from nan to nan"),
    "BYTES no texts": (request(tensor("BYTES", [1], data=[7])), "is not base64"),
    "length no number": (sent(b"{}", Inference_Header_Content_Length="many"), "expected a number of bytes"),
    "binary without length": (sent(request(GOOD_BINARY)["content"]), "Inference-Header-Content-Length must be"),
    "size without length": (
        sent(json.dumps({"inputs": [GOOD_BINARY[0]]}).encode()),
        "after the JSON there are none, since Inference-Header-Content-Length is missing",
    ),
    "data and size": (request((GOOD_BINARY[0] | {"data": VALUES}, DATA)), "has both `data` and `binary_data_size`"),
    "size right, shape not": (request(binary_tensor("UINT8", SHAPE, DATA[:-1])), "requires 768 bytes of data, not 767"),
    "elements left": (request(binary_tensor("BYTES", [1], elements(FILE, b"x"))), "5 bytes of data left over"),
    "shared memory in": (request(tensor("UINT8", SHAPE, parameters={"shared_memory_region": "r"})), "not supported"),
    "unknown output": (request(GOOD, outputs=[{"name": "logits"}]), "no output 'logits'; the model's only output is"),
    "sequence": (request(GOOD, parameters={"sequence_id": 7}), "for stateful models"),
    "not gzip": (sent(b"hello", Content_Encoding="gzip"), "the body is not gzip"),
    "gzip cut": (sent(gzip.compress(bytes(999))[:-9], Content_Encoding="gzip"), "is truncated"),
}


CASES: dict[str, tuple[dict[str, Any], str, int, str]] = {
    **{name: (*case, 400, "invalid_inference_request") for name, case in REFUSED.items()},
    "unknown compression": (sent(b"{}", Content_Encoding="br"), "send gzip, deflate", 415, "unsupported_media_type"),
    "no image": (
        request(binary_tensor("BYTES", [2], elements(FILE, b"no"))),
        "image 2 of 2: this is not an image",
        422,
        "invalid_image",
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_infer_refuses_with_the_reason(frontend: RunningFrontend, name: str) -> None:
    arguments, says, status, reason = CASES[name]
    response = await frontend.client.post(INFER, **arguments)
    assert (response.status_code, response.json()["reason"]) == (status, reason), response.text
    assert says in response.json()["error"]
    assert len(response.json()["error"]) < 400
    assert frontend.predictor.request_ids == []
    await frontend.assert_serves()


async def test_body_that_decompresses_to_the_limit_is_accepted(frontend: RunningFrontend) -> None:
    plain = request(GOOD)["content"]
    packed = sent(gzip.compress(plain + b" " * (MAX_BODY_BYTES - len(plain))), Content_Encoding="gzip")
    assert (await frontend.client.post(INFER, **packed)).status_code == 200


async def test_infer_is_refused_before_parsing_when_the_pipeline_would_refuse_it() -> None:
    async with running_frontend(ColourPredictor(rejection=errors.NotReadyError("stage 1 is missing"))) as frontend:
        response = await frontend.client.post(INFER, content=b"no JSON")
    assert (response.status_code, response.json()["error"]) == (503, "stage 1 is missing")


async def test_infer_returns_500_when_the_model_returns_nan() -> None:
    wrong = Prediction(torch.full((1, 3), torch.nan), MODEL.name, MODEL.version, 0, 0, 0, 1, ())
    async with running_frontend(ColourPredictor(answer=lambda _: wrong)) as frontend:
        response = await frontend.client.post(INFER, **request(GOOD))
    assert (response.status_code, response.json()["reason"]) == (500, "stage_error")


async def test_decompressed_bytes_count_while_other_bodies_are_held() -> None:
    begun = asyncio.Event()
    files = request(binary_tensor("BYTES", [8], elements(*[FILE] * 8)))
    held = len(files["content"]) + 8 * (len(FILE) + 3 * SIDE * SIDE)

    async def stalled() -> AsyncIterator[bytes]:
        yield b"x"
        begun.set()
        await asyncio.Event().wait()

    async with running_frontend(max_body_bytes=held, max_held_bytes=held) as frontend:
        assert (await frontend.client.post(INFER, **files)).status_code == 200
        other = asyncio.create_task(frontend.client.post(INFER, content=stalled()))
        await begun.wait()
        refused = await frontend.client.post(INFER, **files)
        assert (refused.status_code, refused.json()["reason"]) == (429, "overloaded")
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        assert (await frontend.client.post(INFER, **files)).status_code == 200
    async with running_frontend(max_body_bytes=held // 2, max_held_bytes=held // 2) as frontend:
        alone = request(binary_tensor("BYTES", [3], elements(*[FILE] * 3)))
        assert (await frontend.client.post(INFER, **alone)).status_code == 200


async def test_maximum_images_per_request_fit_into_a_body() -> None:
    async with running_frontend(max_body_bytes=3 * SIDE * SIDE * 5 + 1) as frontend:
        # Triton ignores query parameters that it does not know.
        config = await frontend.client.get(f"/v2/models/{MODEL.name}/config?for=others")
        assert config.json()["max_batch_size"] == 5
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
async def test_unknown_models_and_versions_get_404_with_the_known_ones(
    frontend: RunningFrontend, model: str, says: str
) -> None:
    for suffix in ("", "/config", "/stats", "/ready", "/infer"):
        method = "POST" if suffix == "/infer" else "GET"
        response = await frontend.client.request(method, f"/v2/models/{model}{suffix}")
        assert response.status_code == 404
        assert response.json()["reason"] == "unknown_model"
        assert says in response.json()["error"]
        assert len(response.json()["error"]) < 300
