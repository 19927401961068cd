"""Requests with tensors, for the Open Inference Protocol."""

import json
import random
from dataclasses import dataclass
from typing import Any

import httpx

from multiworld_serving.common.config import NO_CREDENTIALS, ClientCredentials, UserError
from multiworld_serving.testing.load.clients import ReferenceRequest

_HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class TensorRequest(ReferenceRequest):
    """A request with raw images as binary data after the JSON header.

    Attributes:
        json_bytes: length of the JSON header.
    """

    json_bytes: int = 0

    @property
    def headers(self) -> dict[str, str]:
        return {"content-type": self.content_type, _HEADER_LENGTH: str(self.json_bytes)}

    def find_error(self, answer: httpx.Response, request_id: str) -> str:
        if answer.status_code != 200:
            return answer.text[:200]
        said = answer.headers.get("x-request-id")
        return "" if said == request_id else f"the answer of another request: {said}"


def tensor_requests(
    url: str, *, images: int, count: int = 8, seed: int = 0, credentials: ClientCredentials = NO_CREDENTIALS
) -> list[TensorRequest]:
    """Return `count` requests with `images` random images each, in the input shape of the served model.

    Raises:
        httpx.HTTPError: a request failed.
        UserError: `images` exceeds the limit of the service.
    """
    with httpx.Client(base_url=url, timeout=30.0, **credentials.options) as client:
        (model,) = client.post("/v2/repository/index").raise_for_status().json()[:1]
        path = f"/v2/models/{model['name']}"
        metadata = client.get(path).raise_for_status().json()
        most = int(client.get(f"{path}/config").raise_for_status().json()["max_batch_size"])
    if images > most:
        raise UserError(f"--images-per-request {images}: the service takes {most} at the most")
    shape = [images, *metadata["inputs"][0]["shape"][1:]]
    generator = random.Random(seed)
    return [_tensor_request(path, metadata["inputs"][0]["name"], shape, generator) for _ in range(count)]


def _tensor_request(path: str, name: str, shape: list[int], generator: random.Random) -> TensorRequest:
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
    return TensorRequest(
        head + generator.randbytes(size), "application/octet-stream", path=f"{path}/infer", json_bytes=len(head)
    )
