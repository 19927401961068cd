"""Serializes the response to an inference request: JSON, or JSON followed by binary data."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multiworld_serving.server.api.oip.infer_request import OutputOptions
from multiworld_serving.server.api.oip.metadata import OUTPUT, Signature
from multiworld_serving.server.errors import StageError
from multiworld_serving.server.predictor import Prediction

HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class EncodedResponse:
    """The body, and the length of the JSON at its start; None = the whole body is JSON."""

    body: bytes
    json_bytes: int | None

    @property
    def media_type(self) -> str:
        return "application/json" if self.json_bytes is None else "application/octet-stream"


def build_response(predictions: Sequence[Prediction], wanted: OutputOptions, signature: Signature) -> EncodedResponse:
    """Serialize the predictions of the images, in their order.

    Raises:
        StageError: the model returned probabilities that are not finite.
    """
    probabilities = torch.stack([prediction.probabilities for prediction in predictions])
    if not probabilities.isfinite().all().item():
        raise StageError("the model returned probabilities that are not finite for this image; check the weights")
    output, binary = _classes(probabilities, wanted, signature) if wanted.classes else _tensor(probabilities, wanted)
    head = {
        "model_name": predictions[0].model,
        "model_version": str(predictions[0].version_number),
        **({"id": wanted.id} if wanted.id is not None else {}),
        "outputs": [{"name": OUTPUT} | output],
    }
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    return EncodedResponse(text, None) if binary is None else EncodedResponse(text + binary, len(text))


def _tensor(probabilities: Tensor, wanted: OutputOptions) -> tuple[dict[str, Any], bytes | None]:
    """[N, num_classes] as FP32."""
    output: dict[str, Any] = {"datatype": "FP32", "shape": list(probabilities.shape)}
    if not wanted.binary:
        return output | {"data": probabilities.flatten().tolist()}, None
    binary = probabilities.contiguous().numpy().tobytes()
    return output | {"parameters": {"binary_data_size": len(binary)}}, binary


def _classes(probabilities: Tensor, wanted: OutputOptions, signature: Signature) -> tuple[dict[str, Any], bytes | None]:
    """[N, classes] as BYTES: "value:index:label" in descending order."""
    best = torch.topk(probabilities, wanted.classes)
    texts = [
        f"{value:.9g}:{index}:{signature.model.labels[index]}"  # nine digits preserve a float32 exactly
        for value, index in zip(best.values.flatten().tolist(), best.indices.flatten().tolist(), strict=True)
    ]
    output: dict[str, Any] = {"datatype": "BYTES", "shape": list(best.values.shape)}
    if not wanted.binary:
        return output | {"data": texts}, None
    binary = b"".join(struct.pack("<I", len(data)) + data for data in (text.encode() for text in texts))
    return output | {"parameters": {"binary_data_size": len(binary)}}, binary
