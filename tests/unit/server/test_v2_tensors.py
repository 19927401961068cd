"""The Open Inference Protocol for models with any inputs and outputs."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from multiworld_serving.common.service.predictor import ImageSizes, Prediction, ServedModel
from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.server.frontend.api.inference import OutputOptions
from multiworld_serving.server.frontend.api.oip.infer_response import build_response
from multiworld_serving.server.frontend.api.oip.metadata import Signature
from multiworld_serving.server.frontend.api.oip.tensors import DATATYPES
from tests.unit.server.frontend_app import ColourPredictor, RunningFrontend, image_bytes, running_frontend
from tests.unit.server.text_model import INFER, TEXT, binary, binary_outputs, tensors, text_predictor
from tests.unit.server.v2_requests import binary_tensor, elements, request

IDS = torch.tensor([[1, 2, 3], [4, 5, 600]])
MASK = torch.tensor([[True, True, False], [False, True, True]])
GIVEN = [("ids", "INT64", IDS), ("mask", "BOOL", MASK)]
SUMS = {"name": "sums"}


@pytest.fixture
async def frontend() -> AsyncIterator[RunningFrontend]:
    async with running_frontend(text_predictor(), TEXT) as running:
        yield running


async def test_rows_of_a_request_are_computed_and_answered_together(frontend: RunningFrontend) -> None:
    given = tensors(IDS.tolist(), MASK.tolist())
    response = await frontend.client.post(INFER, **asked(given[::-1], {"name": "ids"}, SUMS))
    assert response.status_code == 200, response.text
    ids, sums = response.json()["outputs"]
    assert (ids["name"], ids["datatype"], ids["shape"], ids["data"]) == ("ids", "INT64", [2, 3], IDS.flatten().tolist())
    assert (sums["datatype"], sums["shape"], sums["data"]) == ("FP32", [2], [3.0, 605.0])
    assert frontend.predictor.keys == ["3x3"], "rows of one length share batches"


async def test_tensors_travel_as_binary_data_in_both_directions(frontend: RunningFrontend) -> None:
    every = await frontend.client.post(INFER, **binary(GIVEN, parameters={"binary_data_output": True}))
    mixed = await frontend.client.post(
        INFER, **binary(GIVEN, outputs=[{"name": "halves", "parameters": {"binary_data": True}}, SUMS])
    )
    found = binary_outputs(every)
    assert found["ids"] == IDS.numpy().tobytes()
    halves = torch.frombuffer(bytearray(found["halves"]), dtype=torch.bfloat16).view(2, 3)
    assert torch.equal(halves, (IDS / 2).bfloat16())
    assert mixed.status_code == 200, mixed.text
    assert b'"data":[3.0,605.0]' in mixed.content


def test_classes_of_each_token_have_their_labels() -> None:
    outputs = (TensorSpec("probabilities", "float32", ("batch", "tokens", 2)),)
    model = ServedModel("tags", "v1", TEXT.inputs, outputs, TEXT.dimensions, labels=("noun", "verb"))
    rows = model.output_rows.pack([torch.tensor([[[0.75, 0.25], [0.125, 0.875]]])])
    prediction = Prediction(rows, "tags", "v1", 0, 0, 0, 1, ("w",))
    body, _ = build_response(prediction, [OutputOptions(0, 1, False)], None, Signature(model, max_rows=8))
    (output,) = json.loads(body)["outputs"]
    assert (output["shape"], output["data"]) == ([1, 2, 1], ["0.75:0:noun", "0.875:1:verb"])


async def test_metadata_describes_inputs_outputs_and_dimensions(frontend: RunningFrontend) -> None:
    found = (await frontend.client.get("/v2/models/text")).json()
    config = (await frontend.client.get("/v2/models/text/config")).json()
    assert found["inputs"] == [
        {"name": "ids", "datatype": "INT64", "shape": [-1, -1]},
        {"name": "mask", "datatype": "BOOL", "shape": [-1, -1]},
    ]
    outputs = [(each["name"], each["datatype"]) for each in found["outputs"]]
    assert outputs == [("sums", "FP32"), ("halves", "BF16"), ("ids", "INT64")]
    assert found["parameters"]["dimension.tokens"] == "2..6"
    assert config["input"][0] == {
        "name": "ids",
        "data_type": "TYPE_INT64",
        "dims": [-1],
        "format": "FORMAT_NONE",
        "optional": False,
    }


def asked(inputs: list[dict[str, Any]], *outputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments for `client.post`. Without outputs, all are requested."""
    return {"json": {"inputs": inputs, "outputs": list(outputs)}}


def _wrong(at: int, **fields: Any) -> dict[str, Any]:
    given = tensors(IDS.tolist())
    given[at] |= fields
    return asked(given, SUMS)


SHORT, _ = tensors([[1, 2]])
CLASSES = SUMS | {"parameters": {"classification": 1}}
RAW = {"content": bytes(48), "headers": {"Inference-Header-Content-Length": "0"}}
TWOS = binary([GIVEN[0], ("mask", "BOOL", MASK.to(torch.uint8) * 2)], outputs=[SUMS])
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another datatype": (_wrong(0, datatype="FP32"), "'ids' has datatype 'FP32'; the model takes INT64"),
    "another rank": (_wrong(0, shape=[6], data=[0] * 6), "'ids' has shape [6]; expected [N, tokens]"),
    "too long": (asked(tensors([[0] * 7]), SUMS), "the length 7 in the dimension 'tokens'; expected 2 to 6"),
    "other lengths": (asked([SHORT, tensors([[1, 2, 3]])[1]], SUMS), "do not fit together: the dimension 'tokens'"),
    "other rows": (asked([SHORT, tensors([[1, 2], [1, 2]])[1]], SUMS), "different numbers of rows"),
    "numbers for BOOL": (_wrong(1, data=[1] * 6), "true or false for BOOL, and has int"),
    "BOOL of 2": (TWOS, "bytes other than 0 and 1"),
    "classes without labels": (asked(tensors(IDS.tolist()), CLASSES), "needs labels"),
    "raw": (RAW, "inputs are 'ids', 'mask': describe them in JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_request_that_does_not_fit_the_model_is_refused_with_what_was_expected(
    frontend: RunningFrontend, name: str
) -> None:
    arguments, says = REFUSED[name]
    response = await frontend.client.post(INFER, **arguments)
    assert response.status_code == 400, response.text
    assert says in response.json()["error"]


@pytest.mark.parametrize("dtype", DATATYPES)
async def test_every_element_type_is_read_and_written(dtype: str) -> None:
    spec, datatype = TensorSpec("x", dtype, ("batch", 2)), DATATYPES[dtype]
    model = ServedModel("echo", "v1", (spec,), (spec,))

    def echo(rows: torch.Tensor) -> Prediction:
        (values,) = model.input_rows.unpack(rows)
        assert (values.dtype, values.shape) == (getattr(torch, dtype), (len(rows), 2))
        return Prediction(rows, "echo", "v1", 0, 0, 0, 1, ("w",))

    values = torch.tensor([[0, 1], [1, 1]]).to(getattr(torch, dtype))
    given = {"name": "x", "datatype": datatype, "shape": [2, 2], "data": values.tolist()}
    async with running_frontend(ColourPredictor(answer=echo), model) as frontend:
        path = "/v2/models/echo/infer"
        sent = binary([("x", datatype, values)], parameters={"binary_data_output": True})
        found = binary_outputs(await frontend.client.post(path, **sent))
        assert torch.equal(torch.frombuffer(bytearray(found["x"]), dtype=values.dtype), values.flatten())
        raw = values[:1].view(torch.uint8).numpy().tobytes()
        answer = await frontend.client.post(path, content=raw, headers={"Inference-Header-Content-Length": "0"})
        assert binary_outputs(answer)["x"] == raw
        response = await frontend.client.post(path, json={"inputs": [given]})
    assert response.json()["outputs"][0] == given | {"data": values.flatten().tolist()}


@pytest.mark.parametrize(("dtype", "most"), [("float16", 65504.0), ("bfloat16", 3.3895313892515355e38)])
async def test_json_values_of_half_precision_are_rounded_and_refused_out_of_range(dtype: str, most: float) -> None:
    spec = TensorSpec("x", dtype, ("batch", 2))
    model = ServedModel("echo", "v1", (spec,), (spec,))
    echo = ColourPredictor(answer=lambda rows: Prediction(rows, "echo", "v1", 0, 0, 0, 1, ("w",)))
    given = {"name": "x", "datatype": DATATYPES[dtype], "shape": [1, 2]}
    async with running_frontend(echo, model) as frontend:
        rounded = await frontend.client.post("/v2/models/echo/infer", json={"inputs": [given | {"data": [0.1, most]}]})
        refused = await frontend.client.post(
            "/v2/models/echo/infer", json={"inputs": [given | {"data": [0, most * 1.01]}]}
        )
    expected = torch.tensor([0.1, most]).to(getattr(torch, dtype)).tolist()
    assert rounded.json()["outputs"][0]["data"] == expected
    assert f"has values outside the range of {DATATYPES[dtype]}" in refused.json()["error"]


async def test_int32_is_accepted_for_int64(frontend: RunningFrontend) -> None:
    sent = binary([("ids", "INT32", IDS.to(torch.int32)), GIVEN[1]], outputs=[SUMS])
    for arguments, sums in ((_wrong(0, datatype="INT32"), [6.0, 609.0]), (sent, [3.0, 605.0])):
        answer = await frontend.client.post(INFER, **arguments)
        assert answer.json()["outputs"][0]["data"] == sums


@pytest.mark.parametrize("rejected", [False, True])
async def test_inputs_that_are_not_finite_are_treated_alike_as_json_and_as_binary_data(rejected: bool) -> None:
    spec = TensorSpec("x", "float32", ("batch", 3))
    model = ServedModel("echo", "v1", (spec,), (spec,))
    values = torch.tensor([[torch.nan, torch.inf, -torch.inf]])
    given = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": values.flatten().tolist()}
    wants = {"binary_data_output": True}

    echo = ColourPredictor(answer=lambda rows: Prediction(rows, "echo", "v1", 0, 0, 0, 1, ("w",)))
    async with running_frontend(echo, model, finite_inputs=rejected) as frontend:
        text = json.dumps({"inputs": [given], "parameters": wants})
        for sent in ({"content": text}, binary([("x", "FP32", values)], parameters=wants)):
            response = await frontend.client.post("/v2/models/echo/infer", **sent)
            if rejected:
                assert (response.status_code, "the input 'x' contains NaN or infinity" in response.text) == (400, True)
                continue
            found = binary_outputs(response)
            returned = torch.frombuffer(bytearray(found["x"]), dtype=torch.float32)
            torch.testing.assert_close(returned, values.flatten(), equal_nan=True)


async def test_images_without_labels_are_answered_with_tensors_and_not_at_predict() -> None:
    image = TensorSpec("image", "uint8", ("batch", 3, 16, 16))
    model = ServedModel(
        "segments", "v1", (image,), (TensorSpec("out", "float32", ("batch", 2)),), {}, ImageSizes(18, 16)
    )

    def brightness(rows: torch.Tensor) -> Prediction:
        return Prediction(rows.float().mean(dim=(2, 3))[:, :2], "segments", "v1", 0, 0, 0, 1, ("w",))

    async with running_frontend(ColourPredictor(answer=brightness), model) as frontend:
        described, data = binary_tensor("BYTES", [1], elements(image_bytes("white")))
        sent = request((described | {"name": "image"}, data))
        answer = await frontend.client.post("/v2/models/segments/infer", **sent)
        refused = await frontend.client.post("/predict", files={"image": image_bytes()})
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"] == [{"name": "out", "datatype": "FP32", "shape": [1, 2], "data": [255.0] * 2}]
    assert (refused.status_code, refused.json()["reason"]) == (404, "wrong_path")
    assert "does not have labels; send its inputs to /v2/models/segments/infer" in refused.json()["error"]
