"""Questions as tensors, by the Open Inference Protocol."""

import json
import random
from dataclasses import dataclass
from typing import Any

import httpx

from chaos.load import Question
from config import NOTHING, Access, UserError

_HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class TensorQuestion(Question):
    """Images of one request, as binary data behind JSON.

    Attributes:
        json_bytes: length of the JSON.
    """

    json_bytes: int = 0

    @property
    def headers(self) -> dict[str, str]:
        return {"content-type": self.content_type, _HEADER_LENGTH: str(self.json_bytes)}

    def complaint(self, answer: httpx.Response, request_id: str) -> str:
        if answer.status_code != 200:
            return answer.text[:200]
        said = answer.headers.get("x-request-id")
        return "" if said == request_id else f"the answer of another request: {said}"


def tensor_questions(
    url: str, *, images: int, count: int = 8, seed: int = 0, way_in: Access = NOTHING
) -> list[TensorQuestion]:
    """So many requests with so many random images each, of the size that the model of this service takes.

    Raises:
        httpx.HTTPError: the service does not answer.
        UserError: it takes fewer images in a request.
    """
    with httpx.Client(base_url=url, timeout=30.0, **way_in.options) as client:
        (model,) = client.post("/v2/repository/index").raise_for_status().json()[:1]
        path = f"/v2/models/{model['name']}"
        metadata = client.get(path).raise_for_status().json()
        most = int(client.get(f"{path}/config").raise_for_status().json()["max_batch_size"])
    if images > most:
        raise UserError(f"--images-per-request {images}: the service takes {most} at the most")
    shape = [images, *metadata["inputs"][0]["shape"][1:]]
    generator = random.Random(seed)
    return [_question(path, metadata["inputs"][0]["name"], shape, generator) for _ in range(count)]


def _question(path: str, name: str, shape: list[int], generator: random.Random) -> TensorQuestion:
    size = 1
    for side in shape:
        size *= side
    tensor: dict[str, Any] = {
        "name": name,
        "datatype": "UINT8",
        "shape": shape,
        "parameters": {"binary_data_size": size},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return TensorQuestion(
        head + generator.randbytes(size), "application/octet-stream", path=f"{path}/infer", json_bytes=len(head)
    )
