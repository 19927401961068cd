"""A model with several inputs and outputs and a variable dimension, computed by a fake pipeline."""

from typing import Any

import httpx
import torch
from torch import Tensor

from multiworld_serving.common.service.predictor import Prediction, ServedModel
from multiworld_serving.models.bundle.manifest import TensorSpec
from tests.unit.server.frontend_app import ColourPredictor
from tests.unit.server.v2_requests import binary_tensor, parts, request

TEXT = ServedModel(
    "text",
    "v1",
    (TensorSpec("ids", "int64", ("batch", "tokens")), TensorSpec("mask", "bool", ("batch", "tokens"))),
    (
        TensorSpec("sums", "float32", ("batch",)),
        TensorSpec("halves", "bfloat16", ("batch", "tokens")),
        TensorSpec("ids", "int64", ("batch", "tokens")),
    ),
    {"batch": (1, 8), "tokens": (2, 6)},
)
INFER = "/v2/models/text/infer"


def text_predictor() -> ColourPredictor:
    """Sums the ids where the mask is set, halves them, and returns them."""

    def answer(rows: Tensor) -> Prediction:
        ids, mask = TEXT.input_rows.unpack(rows)
        outputs = ((ids * mask).sum(1).float(), (ids / 2).bfloat16(), ids)
        return Prediction(TEXT.output_rows.pack(outputs), "text", "v1", 0, 0, 0, 1, ("w",))

    return ColourPredictor(answer=answer, serves=TEXT)


def tensors(ids: list[list[int]], mask: list[list[bool]] | None = None) -> list[dict[str, Any]]:
    """The inputs as JSON."""
    mask = mask if mask is not None else [[True] * len(row) for row in ids]
    shape = [len(ids), len(ids[0])]
    return [
        {"name": "ids", "datatype": "INT64", "shape": shape, "data": ids},
        {"name": "mask", "datatype": "BOOL", "shape": shape, "data": mask},
    ]


def binary(inputs: list[tuple[str, str, Tensor]], **fields: Any) -> dict[str, Any]:
    """The arguments for `client.post` with binary data."""
    given = []
    for name, datatype, tensor in inputs:
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        described, _ = binary_tensor(datatype, list(tensor.shape), data)
        given.append((described | {"name": name}, data))
    return request(*given, **fields)


def binary_outputs(response: httpx.Response) -> dict[str, bytes]:
    """The binary data of each output."""
    head, data = parts(response)
    found = {}
    for output in head["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found[output["name"]], data = data[:size], data[size:]
    return found
