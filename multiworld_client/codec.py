"""Builds requests and parses answers, for `/predict` and the Open Inference Protocol. No I/O."""

from __future__ import annotations

import contextlib
import json
import math
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, unquote

import httpx

from multiworld_client.errors import InputError, ProtocolError
from multiworld_client.inputs import DATATYPES, TensorInput, encode_tensor, media_type
from multiworld_client.results import Label, Prediction
from multiworld_client.retries import RemainingTime

HEADER_LENGTH = "Inference-Header-Content-Length"
_DTYPES = {datatype: name for name, datatype in DATATYPES.items()}
_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True)
class PreparedRequest:
    """A request that may be sent several times; only its remaining time changes."""

    path: str
    content: bytes
    headers: Mapping[str, str]
    params: Mapping[str, str | int] = field(default_factory=dict)
    method: str = "POST"

    def build(self, http: httpx.Client | httpx.AsyncClient, url: str, remaining: RemainingTime) -> httpx.Request:
        """Build the request for one try at the service's `url`. Its header tells the service the remaining time."""
        headers = {**self.headers, "X-Request-Timeout-S": f"{max(remaining.seconds, 0.001):.6f}"}
        return http.build_request(
            self.method,
            url + self.path,
            content=self.content,
            headers=headers,
            params=dict(self.params),
            extensions={"timeout": remaining},
        )


MODELS = PreparedRequest("/v2/models", b"", {}, method="GET")
"""Request for the names of the served models."""


def metadata_request(model: str) -> PreparedRequest:
    """The request for the inputs and outputs of a model."""
    return PreparedRequest(f"/v2/models/{quote(model, safe='')}", b"", {}, method="GET")


def file_request(file: bytes, model: str | None, top_k: int | None, request_id: str | None) -> PreparedRequest:
    """The request to classify the image in a file. Raises InputError if it or `request_id` is invalid."""
    request = body_request(file, model, media_type(file), request_id)
    return request if top_k is None else replace(request, params={"top_k": top_k})


def pixels_request(
    image: TensorInput, model: str, names: tuple[str, str], top_k: int | None, request_id: str | None
) -> PreparedRequest:
    """The request to classify one or more images in a tensor. Raises InputError if `request_id` is invalid.

    Args:
        names: of the model's input and output.
    """
    output = {"name": names[1], "parameters": {"classification": top_k or 5}}
    return tensor_request(model, {names[0]: image}, request_id, outputs=[output])


def infer_request(inputs: Mapping[str, object], model: str, request_id: str | None) -> PreparedRequest:
    """The request for a batch of samples. Raises InputError if an input cannot be sent."""
    if not inputs:
        raise InputError("there are no inputs; pass a dict of arrays by name")
    tensors = {name: encode_tensor(name, value) for name, value in inputs.items()}
    return tensor_request(model, tensors, request_id, parameters={"binary_data_output": True})


def body_request(body: bytes, model: str | None, content_type: str, request_id: str | None) -> PreparedRequest:
    """The request for /predict. Raises InputError if `request_id` is invalid."""
    path = "/predict" if model is None else f"/predict/{quote(model, safe='')}"
    return PreparedRequest(path, body, _id_header(request_id) | {"Content-Type": content_type})


def tensor_request(
    model: str, inputs: Mapping[str, TensorInput], request_id: str | None, **fields: object
) -> PreparedRequest:
    """A request of the Open Inference Protocol with binary data. Raises InputError if `request_id` is invalid.

    Args:
        inputs: by name.
        fields: further fields of the JSON.
    """
    described = [tensor.described(name) for name, tensor in inputs.items()]
    head = json.dumps({"inputs": described, **fields}).encode()
    headers = _id_header(request_id) | {HEADER_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}
    body = b"".join((head, *(tensor.content for tensor in inputs.values())))
    return PreparedRequest(f"/v2/models/{quote(model, safe='')}/infer", body, headers)


def _id_header(request_id: str | None) -> dict[str, str]:
    if request_id is not None and not _ID.fullmatch(request_id):
        raise InputError(
            f"invalid request id {request_id[:140]!r}: expected 1 to 128 printable ASCII characters without spaces"
        )
    return {"X-Request-Id": request_id or uuid.uuid4().hex}


@contextlib.contextmanager
def parsing(response: httpx.Response) -> Iterator[None]:
    """Raises ProtocolError if the block fails to parse this successful answer."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ProtocolError(
            f"the answer from {response.url} is not from a multiworld service ({error!r}); check the URL of the client"
        ) from error


def predictions(response: httpx.Response, tries: int) -> list[Prediction]:
    """Parse a successful answer: one prediction per image. Raises ProtocolError if it cannot be parsed."""
    with parsing(response):
        body = response.json()
        labels = _labels_of_predict(body) if "predictions" in body else _labels_of_infer(body)
        model = str(body["model"] if "predictions" in body else body["model_name"])
        headers = response.headers
        path = tuple(unquote(world) for world in headers["x-path"].split(","))
        common = (model, unquote(headers["x-model-version"]), headers["x-request-id"], path, int(headers["x-attempts"]))
        return [Prediction(each, *common, tries) for each in labels]


def only_model(response: httpx.Response) -> str:
    """The only model's name from the answer to `MODELS`.

    Raises:
        InputError: there are several models, or none.
        ProtocolError: the answer cannot be parsed.
    """
    with parsing(response):
        names = [str(name) for name in response.json()["models"]]
    if len(names) != 1:
        raise InputError(f"the models here are {', '.join(map(repr, names)) or 'none'}; give one of them as `model`")
    return names[0]


def input_and_output(response: httpx.Response) -> tuple[str, str]:
    """The names of a classifier's input and output from its metadata. Raises ProtocolError if they cannot be parsed."""
    with parsing(response):
        body = response.json()
        return str(body["inputs"][0]["name"]), str(body["outputs"][0]["name"])


def _labels_of_predict(body: Mapping[str, Any]) -> list[tuple[Label, ...]]:
    found = body["predictions"]
    return [tuple(Label(str(each["label"]), int(each["class_id"]), float(each["probability"])) for each in found)]


def _labels_of_infer(body: Mapping[str, Any]) -> list[tuple[Label, ...]]:
    (output,) = body["outputs"]
    images, classes = output["shape"]
    if len(output["data"]) != images * classes or not output["data"]:
        raise ValueError(f"{len(output['data'])} classes for {images} images")
    parsed = (text.split(":", 2) for text in output["data"])  # "value:index:label"; the label may contain colons
    labels = [Label(label, int(index), float(value)) for value, index, label in parsed]
    return [tuple(labels[at : at + classes]) for at in range(0, len(labels), classes)]


def outputs(response: httpx.Response) -> dict[str, Any]:
    """Parse a successful answer: numpy arrays by name; BF16 becomes float32. Raises ProtocolError if it cannot be parsed."""
    import numpy as np  # noqa: PLC0415 - only callers of `infer` need it

    with parsing(response):
        length = int(response.headers[HEADER_LENGTH])
        data, at, found = response.content, length, {}
        for output in json.loads(data[:length])["outputs"]:
            start, at = at, at + int(output["parameters"]["binary_data_size"])
            shape, datatype = [int(size) for size in output["shape"]], str(output["datatype"])
            dtype = np.dtype("uint16" if datatype == "BF16" else _DTYPES[datatype])
            if at > len(data) or at - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{at - start} bytes for {datatype} {shape}")
            array = np.frombuffer(data[start:at], dtype=dtype).reshape(shape).copy()
            if datatype == "BF16":
                array = (array.astype(np.uint32) << 16).view(np.float32)
            found[str(output["name"])] = array
        return found
