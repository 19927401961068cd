"""Requests of the clients, against the real HTTP application."""

import json
from dataclasses import replace

import httpx
import msgspec.structs
import numpy as np
import pytest
import torch

from multiworld_client import AsyncClient, InputError, InvalidRequestError, ProtocolError
from multiworld_client.codec import infer_request, outputs
from tests.unit.server.frontend_app import MODEL, image_bytes, running_frontend
from tests.unit.server.test_groups import frontend
from tests.unit.server.text_model import TEXT, text_predictor

IDS = np.array([[1, 2, 3], [4, 5, 6]])


async def client_of(http: httpx.AsyncClient) -> AsyncClient:
    """A client that sends its requests through this one."""
    client = AsyncClient("http://test")
    await client._http.aclose()
    client._http = http
    return client


async def test_infer_sends_named_arrays_and_returns_the_outputs() -> None:
    async with running_frontend(text_predictor(), TEXT) as running:
        client = await client_of(running.client)
        found = await client.infer({"mask": torch.tensor([[True] * 3] * 2), "ids": IDS})
        with pytest.raises(InvalidRequestError, match="the model takes INT64"):
            await client.infer({"ids": IDS.astype(np.float32), "mask": IDS > 0})
    assert found["sums"].tolist() == [6.0, 15.0]
    assert (found["halves"].dtype, found["halves"].tolist()) == (np.float32, (IDS / 2).tolist())
    assert np.array_equal(found["ids"], IDS)


async def test_arrays_and_batches_are_classified_when_the_input_has_another_name() -> None:
    images = msgspec.structs.replace(MODEL.inputs[0], name="images")
    scores = msgspec.structs.replace(MODEL.outputs[0], name="scores")
    async with running_frontend(model=replace(MODEL, inputs=(images,), outputs=(scores,))) as running:
        client = await client_of(running.client)
        found = [await client.predict(np.full((3, 16, 16), [[[0]], [[0]], [[255]]], np.uint8))]
        found += await client.predict_batch([image_bytes("blue")] * 2)
    assert [prediction.label for prediction in found] == ["blue"] * 3


async def test_call_names_the_model_when_there_are_several() -> None:
    async with frontend("a", "b") as (http, metrics):
        client = await client_of(http)
        pixels, file = np.zeros((1, 3, 16, 16), np.uint8), image_bytes("blue")
        for unnamed in (client.infer({"input": pixels}), client.predict(pixels), client.predict_batch([file])):
            with pytest.raises(InputError, match="the models here are 'a', 'b'; give one of them as `model`"):
                await unnamed
        await client.predict(file)  # of the first model, as /predict
        await client.infer({"input": pixels}, model="b")
        await client.predict(pixels, model="b")
        await client.predict_batch([file], model="b")
        await client.predict(file, model="b")
        answer = await client.predict_body(file, model="b", content_type="image/png")
    counted = metrics.registry.get_sample_value
    assert counted("multiworld_images_total", {"model": "b", "version": MODEL.version}) == 5
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
