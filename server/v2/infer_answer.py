"""The answer to an inference request, as JSON or as JSON followed by binary data."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from server.errors import StageError
from server.predictor import Answer
from server.v2.infer_request import RequestedAnswer
from server.v2.signature import OUTPUT, Signature

HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class InferAnswer:
    """Body and length of the JSON at its front; None when all of it is JSON."""

    body: bytes
    json_bytes: int | None

    @property
    def media_type(self) -> str:
        return "application/json" if self.json_bytes is None else "application/octet-stream"


def build_answer(answers: Sequence[Answer], wanted: RequestedAnswer, signature: Signature) -> InferAnswer:
    """Put the answers of the images together, in their order.

    Raises:
        StageError: the model gave no finite probabilities.
    """
    probabilities = torch.stack([answer.probabilities for answer in answers])
    if not probabilities.isfinite().all().item():
        raise StageError("the model gave no finite probabilities for this image; check the weights")
    output, binary = _classes(probabilities, wanted, signature) if wanted.classes else _tensor(probabilities, wanted)
    head = {
        "model_name": answers[0].model,
        "model_version": str(answers[0].version_number),
        **({"id": wanted.id} if wanted.id is not None else {}),
        "outputs": [{"name": OUTPUT} | output],
    }
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
    return InferAnswer(text, None) if binary is None else InferAnswer(text + binary, len(text))


def _tensor(probabilities: Tensor, wanted: RequestedAnswer) -> tuple[dict[str, Any], bytes | None]:
    """[N, num_classes] as FP32."""
    output: dict[str, Any] = {"datatype": "FP32", "shape": list(probabilities.shape)}
    if not wanted.binary:
        return output | {"data": probabilities.flatten().tolist()}, None
    binary = probabilities.contiguous().numpy().tobytes()
    return output | {"parameters": {"binary_data_size": len(binary)}}, binary


def _classes(
    probabilities: Tensor, wanted: RequestedAnswer, signature: Signature
) -> tuple[dict[str, Any], bytes | None]:
    """[N, classes] as BYTES: "value:index:label", the most probable first."""
    best = torch.topk(probabilities, wanted.classes)
    texts = [
        f"{value:.9g}:{index}:{signature.model.labels[index]}"  # nine digits bring a float32 back as it was
        for value, index in zip(best.values.flatten().tolist(), best.indices.flatten().tolist(), strict=True)
    ]
    output: dict[str, Any] = {"datatype": "BYTES", "shape": list(best.values.shape)}
    if not wanted.binary:
        return output | {"data": texts}, None
    binary = b"".join(struct.pack("<I", len(data)) + data for data in (text.encode() for text in texts))
    return output | {"parameters": {"binary_data_size": len(binary)}}, binary
