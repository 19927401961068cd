"""Requests of the Open Inference Protocol for the color model, written by hand."""

import gzip
import json
import struct
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import torch
from torch import Tensor

from multiworld_serving.server.frontend.api.oip.infer_response import HEADER_LENGTH
from multiworld_serving.server.frontend.api.oip.metadata import Signature
from tests.unit.server.frontend_app import MODEL, SIDE

SIGNATURE = Signature(MODEL, max_rows=8)
INFER = f"/v2/models/{MODEL.name}/infer"
PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": partial(gzip.compress, mtime=0), "deflate": zlib.compress}
"""Compression functions by Content-Encoding, independent of the product's code."""
COLOURS = ("red", "green", "blue")


def pixels(*colours: str) -> Tensor:
    """uint8 [N,3,S,S], an image of each color."""
    images = torch.zeros(len(colours), 3, SIDE, SIDE, dtype=torch.uint8)
    for image, colour in zip(images, colours, strict=True):
        image[COLOURS.index(colour)] = 200
    return images


def tensor(datatype: str, shape: list[int], **fields: Any) -> dict[str, Any]:
    """The input in JSON."""
    return {"name": "input", "datatype": datatype, "shape": shape, **fields}


def binary_tensor(datatype: str, shape: list[int], data: bytes) -> tuple[dict[str, Any], bytes]:
    """The JSON part of the input, and the binary data after it."""
    return tensor(datatype, shape, parameters={"binary_data_size": len(data)}), data


def elements(*contents: bytes) -> bytes:
    """BYTES as binary data."""
    return b"".join(struct.pack("<I", len(content)) + content for content in contents)


def request(*given: dict[str, Any] | tuple[dict[str, Any], bytes], **fields: Any) -> dict[str, Any]:
    """The arguments for `client.post`: inputs in JSON, or with binary data."""
    inputs = [each if isinstance(each, tuple) else (each, None) for each in given]
    text = json.dumps({"inputs": [described for described, _ in inputs], **fields}).encode()
    data = [content for _, content in inputs if content is not None]
    headers = {"headers": {HEADER_LENGTH: str(len(text))}} if data else {}
    return {"content": text + b"".join(data), **headers}


def wanting(**parameters: Any) -> list[dict[str, Any]]:
    """The `outputs` of a request."""
    return [{"name": "probabilities", "parameters": parameters}]


def parts(response: httpx.Response) -> tuple[dict[str, Any], bytes]:
    """The JSON of an answer and the output's binary data."""
    assert response.status_code == 200, response.text
    length = response.headers.get(HEADER_LENGTH)
    if length is None:
        return response.json(), b""
    head = json.loads(response.content[: int(length)])
    data = response.content[int(length) :]
    assert len(data) == sum(each.get("parameters", {}).get("binary_data_size", 0) for each in head["outputs"])
    return head, data


def strongest(response: httpx.Response) -> list[str]:
    """The most probable color of each image, for every format of the probabilities."""
    head, data = parts(response)
    (output,) = head["outputs"]
    assert (output["name"], output["datatype"], output["shape"][1]) == ("probabilities", "FP32", len(COLOURS))
    values = torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.tensor(output["data"])
    return [COLOURS[index] for index in values.view(output["shape"]).argmax(1).tolist()]
