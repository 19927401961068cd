"""Messages of the Open Inference Protocol over gRPC: their definition, and what they become."""

import struct
from typing import Any

import pytest
import torch
from hypothesis import given as generated
from hypothesis import settings, strategies
from tritonclient.grpc import service_pb2 as pb

from multiworld_serving.common.service.errors import InferenceRequestError, RequestRejected, UnknownModelError
from multiworld_serving.common.service.predictor import ModelVersion, Prediction
from multiworld_serving.server.frontend.api.inference import InferRequest
from multiworld_serving.server.frontend.api.oip.metadata import Signature
from multiworld_serving.server.frontend.api.oip_grpc.infer_messages import infer_message, parse_infer_message
from tests.unit.server.frontend_app import MODEL, image_bytes
from tests.unit.server.grpc_port import infer, tensor, wanted
from tests.unit.server.text_model import TEXT
from tests.unit.server.v2_requests import elements, pixels

NOW = ModelVersion(1, "v1")
SIGNATURES = {model.name: Signature(model, max_rows=8) for model in (MODEL, TEXT)}
ONE = pixels("red")
SHAPE = list(ONE.shape)
FILE = image_bytes("red")
IDS = torch.tensor([[1, 2, 3], [4, 5, 600]])
MASK = torch.tensor([[True, True, False], [False, True, True]])
TYPED = (
    tensor("ids", "INT64", [2, 3], int64_contents=IDS.flatten().tolist()),
    tensor("mask", "BOOL", [2, 3], bool_contents=MASK.flatten().tolist()),
)


def parsed(message: Any) -> InferRequest:
    return parse_infer_message(message.SerializeToString(), SIGNATURES[message.model_name], NOW)


def test_inputs_have_the_same_rows_typed_and_raw_in_any_order() -> None:
    raw = [MASK.numpy().tobytes(), IDS.numpy().tobytes()]
    plain = (tensor("mask", "BOOL", [2, 3]), tensor("ids", "INT64", [2, 3]))
    typed = parsed(infer(*TYPED, model_name="text"))
    for other in (infer(*TYPED[::-1], model_name="text"), infer(*plain, raw=raw, model_name="text")):
        rows = parsed(other).rows
        assert len(rows) == 2
        assert torch.equal(rows, typed.rows)  # type: ignore[arg-type]
    assert (typed.key, typed.id, typed.timeout_s, typed.version) == ("3x3", None, None, None)


def test_image_files_are_taken_in_both_representations() -> None:
    typed = infer(tensor("input", "BYTES", [2], bytes_contents=[FILE, b""]))
    raw = infer(tensor("input", "BYTES", [2, 1]), raw=[elements(FILE, b"")])
    assert list(parsed(typed).rows) == list(parsed(raw).rows) == [FILE, b""]


def test_fields_and_parameters_mean_the_same_as_over_http() -> None:
    message = infer(
        tensor("input", "UINT8", SHAPE),
        raw=[ONE.numpy().tobytes()],
        id="mine",
        model_version="1",
        given={"timeout": 2_000_000, "priority": 3, "binary_data_output": False},
        outputs=[wanted("probabilities", classification=2, binary_data=False)],
    )
    asked = parsed(message)
    assert (asked.id, asked.version, asked.timeout_s) == ("mine", 1, 2.0)
    assert [(each.index, each.classes, each.binary) for each in asked.outputs] == [(0, 2, True)]


def test_outputs_are_raw_in_the_order_asked_for() -> None:
    outputs = (torch.tensor([3.5]), torch.tensor([[1, 2, 3]]).bfloat16(), torch.tensor([[7, 8, 9]]))
    prediction = Prediction(TEXT.output_rows.pack(outputs), "text", "v1", 0, 0, 0, 1, ("w",))
    asked = parsed(infer(*TYPED, model_name="text", id="mine", outputs=[wanted("ids"), wanted("halves")]))
    data = infer_message(prediction, asked, SIGNATURES["text"])
    found = pb.ModelInferResponse.FromString(data)
    assert (found.model_name, found.model_version, found.id) == ("text", "1", "mine")
    described = [(each.name, each.datatype, list(each.shape)) for each in found.outputs]
    assert described == [("ids", "INT64", [1, 3]), ("halves", "BF16", [1, 3])]
    halves = outputs[1].view(torch.int16).numpy().tobytes()
    assert list(found.raw_output_contents) == [struct.pack("<3q", 7, 8, 9), halves]


def image(datatype: str = "UINT8", shape: list[int] = SHAPE, **contents: Any) -> Any:
    return tensor("input", datatype, shape, **contents)


DATA = ONE.numpy().tobytes()
REFUSED: dict[str, tuple[Any, str]] = {
    "no values": (infer(image()), "has its values in no field; expected raw_input_contents or uint_contents"),
    "both": (infer(image(uint_contents=[1]), raw=[DATA]), "both `contents` and `raw_input_contents`"),
    "another field": (infer(image(int_contents=[1])), "has its values in int_contents; expected"),
    "unknown datatype": (infer(image("FP99", fp32_contents=[1])), "datatype 'FP99'; send UINT8"),
    "many dimensions": (infer(image(shape=[1] * 100_000), raw=[DATA]), "expected [N, 3, 16, 16]"),
    "a wrong timeout": (
        infer(image(), raw=[DATA], given={"timeout": "1"}),
        "Expected `int`, got `str` - at `$.parameters.timeout`",
    ),
    "many values": (infer(image(uint_contents=[0] * 1_000_001)), "1000001 values, at most 1000000; send `raw_input"),
    "many inputs": (infer(*[tensor("", "", [])] * 30_000), "more than 20000 inputs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_request_is_refused_with_a_clear_sentence(name: str) -> None:
    message, says = REFUSED[name]
    with pytest.raises(RequestRejected) as raised:
        parsed(message)
    assert raised.value.reason == "invalid_inference_request"
    assert says in raised.value.detail
    assert len(raised.value.detail) < 300


GOOD = infer(*TYPED, model_name="text", given={"timeout": 1}, outputs=[wanted("ids")]).SerializeToString()


@settings(max_examples=300)
@generated(
    strategies.one_of(
        strategies.binary(max_size=200),
        strategies.tuples(strategies.integers(0, len(GOOD) - 1), strategies.binary(max_size=4)).map(
            lambda cut: GOOD[: cut[0]] + cut[1] + GOOD[cut[0] + len(cut[1]) :]
        ),
    )
)
def test_any_bytes_are_a_request_or_refused(body: bytes) -> None:
    try:
        found = parse_infer_message(body, SIGNATURES["text"], NOW)
    except (InferenceRequestError, UnknownModelError):
        return
    assert len(found.rows)
