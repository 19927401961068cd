"""`infer` of the clients, against the real HTTP application."""

import json

import httpx
import numpy as np
import pytest
import torch

from multiworld_client import AsyncClient, InputError, InvalidRequestError, ProtocolError
from multiworld_client.tensors import infer_request, outputs
from tests.unit.server.frontend_app import image_bytes, running_frontend
from tests.unit.server.text_model import TEXT, text_predictor

IDS = np.array([[1, 2, 3], [4, 5, 6]])


async def test_infer_sends_named_arrays_and_returns_the_outputs() -> None:
    async with running_frontend(text_predictor(), TEXT) as frontend:
        client = AsyncClient("http://test")
        await client._http.aclose()
        client._http = frontend.client
        found = await client.infer({"mask": torch.tensor([[True] * 3] * 2), "ids": IDS})
        with pytest.raises(InvalidRequestError, match="the model takes INT64"):
            await client.infer({"ids": IDS.astype(np.int32), "mask": IDS > 0})
    assert found["sums"].tolist() == [6.0, 15.0]
    assert (found["halves"].dtype, found["halves"].tolist()) == (np.float32, (IDS / 2).tolist())
    assert np.array_equal(found["ids"], IDS)


async def test_body_is_sent_as_it_is() -> None:
    async with running_frontend() as frontend:
        client = AsyncClient("http://test")
        await client._http.aclose()
        client._http = frontend.client
        answer = await client.predict_body(image_bytes("blue"), content_type="image/png")
    assert json.loads(answer)["predictions"][0]["label"] == "blue"


def test_bfloat16_is_sent_as_it_is() -> None:
    tensor = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    request = infer_request({"x": tensor}, "m", None)
    assert b'"datatype": "BF16", "shape": [1, 2]' in request.content
    assert request.content.endswith(tensor.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("wrong", [{}, {"x": [1, 2]}, {"x": np.array(["a"])}, {"x": None}])
def test_what_is_no_array_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match="pass"):
        infer_request(wrong, "m", None)


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b"[]",
        b'{"outputs": [{"name": "a", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 4}}]}1234',
        b'{"outputs": [{"name": "a", "datatype": "STRING", "shape": [1], "parameters": {"binary_data_size": 4}}]}1234',
    ],
)
def test_answer_of_another_service_is_a_protocol_error(content: bytes) -> None:
    length = str(content.rindex(b"}") + 1 if content != b"[]" else 2)
    request = httpx.Request("POST", "http://test")
    response = httpx.Response(
        200, headers={"Inference-Header-Content-Length": length}, content=content, request=request
    )
    with pytest.raises(ProtocolError, match="not from a multiworld service"):
        outputs(response)
