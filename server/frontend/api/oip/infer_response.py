"""Serializes the response to an inference request: JSON, or JSON followed by binary data."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from multiworld_serving.common.service.errors import InferenceRequestError
from multiworld_serving.common.service.predictor import Prediction
from multiworld_serving.server.frontend.api.inference import OutputOptions, output_tensors
from multiworld_serving.server.frontend.api.oip.metadata import Signature
from multiworld_serving.server.frontend.api.oip.objects import object_outputs
from multiworld_serving.server.frontend.api.oip.tensors import DATATYPES

HEADER_LENGTH = "Inference-Header-Content-Length"
_MAX_JSON_VALUES = 1_000_000
"""In all outputs of a response. As for requests, more numbers must be binary."""


def encoded_outputs(
    prediction: Prediction, wanted: Sequence[OutputOptions], signature: Signature
) -> list[tuple[dict[str, Any], bytes | None]]:
    """The wanted outputs of the samples, in their order: how JSON describes each, and its binary data.

    Raises:
        InferenceRequestError: JSON cannot express the values, or there are too many.
        StageError: as `output_tensors`.
    """
    if signature.model.pipeline is not None:
        names = [each.name for each in wanted if each.name]
        found = object_outputs(prediction, names)
        options = wanted if names else list(wanted) * len(found)
        _check_count(
            sum(math.prod(each.shape) for each, option in zip(found, options, strict=True) if not option.binary)
        )
        return [_described(*each, binary=option.binary) for each, option in zip(found, options, strict=True)]
    tensors = output_tensors(prediction, signature.model)
    values = sum(tensors[each.index].numel() for each in wanted if not each.binary and not each.classes)
    _check_count(values)
    return [_output(tensors[each.index], each, signature) for each in wanted]


def _check_count(values: int) -> None:
    if values > _MAX_JSON_VALUES:
        raise InferenceRequestError(
            f"the outputs have {values} values, and JSON may have {_MAX_JSON_VALUES}; ask for binary data with `binary_data_output`"
        )


def build_response(
    prediction: Prediction, wanted: Sequence[OutputOptions], request_id: str | None, signature: Signature
) -> tuple[bytes, int | None]:
    """Serialize the prediction.

    Args:
        request_id: the client's id; None = none.
    Returns:
        The body, and the length of the JSON at its start; None = the whole body is JSON.
    Raises:
        InferenceRequestError, StageError: as `encoded_outputs`.
    """
    parts = encoded_outputs(prediction, wanted, signature)
    head = {
        "model_name": prediction.model,
        "model_version": str(prediction.version_number),
        **({"id": request_id} if request_id is not None else {}),
        "outputs": [described for described, _ in parts],
    }
    try:
        text = msgspec.json.encode(head)
    except UnicodeEncodeError:  # the client's id has half a surrogate pair
        text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    binaries = [binary for _, binary in parts if binary is not None]
    return (b"".join((text, *binaries)), len(text)) if binaries else (text, None)


def _output(tensor: Tensor, wanted: OutputOptions, signature: Signature) -> tuple[dict[str, Any], bytes | None]:
    """The JSON part of an output, and its binary data. Probabilities become BYTES if classes are wanted."""
    spec = signature.model.outputs[wanted.index]
    if wanted.classes:
        best = torch.topk(tensor, wanted.classes)
        texts = [
            f"{value:.9g}:{index}:{signature.model.labels[index]}"  # nine digits preserve a float32 exactly
            for value, index in zip(best.values.flatten().tolist(), best.indices.flatten().tolist(), strict=True)
        ]
        return _described(spec.name, [text.encode() for text in texts], list(best.values.shape), binary=wanted.binary)
    return _described(spec.name, tensor, list(tensor.shape), binary=wanted.binary)


def _described(
    name: str, values: Tensor | list[bytes], shape: list[int], *, binary: bool
) -> tuple[dict[str, Any], bytes | None]:
    """The JSON part of an output of a tensor, or of BYTES, and its binary data. Raises InferenceRequestError."""
    if isinstance(values, list):
        output: dict[str, Any] = {"name": name, "datatype": "BYTES", "shape": shape}
        if not binary:
            return output | {"data": [each.decode("utf-8", "replace") for each in values]}, None
        data = b"".join(struct.pack("<I", len(each)) + each for each in values)
    else:
        output = {"name": name, "datatype": DATATYPES[str(values.dtype).removeprefix("torch.")], "shape": shape}
        if not binary:
            if values.is_floating_point() and not values.isfinite().all().item():
                raise InferenceRequestError(
                    f"the output {name!r} has values that are not finite, which JSON cannot express; ask for binary data"
                )
            return output | {"data": values.flatten().tolist()}, None
        data = values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return output | {"parameters": {"binary_data_size": len(data)}}, data
