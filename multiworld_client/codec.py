"""Builds requests and parses answers, for `/predict` and the Open Inference Protocol. No I/O."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, unquote

import httpx

from multiworld_client.errors import InputError, ProtocolError
from multiworld_client.inputs import FileInput, TensorInput
from multiworld_client.results import Label, Prediction
from multiworld_client.retries import RemainingTime

_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True)
class PreparedRequest:
    """A request that may be sent several times; only its remaining time changes."""

    path: str
    content: bytes
    headers: Mapping[str, str]
    params: Mapping[str, str | int] = field(default_factory=dict)

    def build(self, http: httpx.Client | httpx.AsyncClient, url: str, remaining: RemainingTime) -> httpx.Request:
        """Build the request for one try at the service's `url`. Its header tells the service the remaining time."""
        headers = {**self.headers, "X-Request-Timeout-S": f"{max(remaining.seconds, 0.001):.6f}"}
        return http.build_request(
            "POST",
            url + self.path,
            content=self.content,
            headers=headers,
            params=dict(self.params),
            extensions={"timeout": remaining},
        )


REPOSITORY_INDEX = PreparedRequest("/v2/repository/index", b"", {})
"""Request for the name of the served model."""


def inference_request(
    image: FileInput | TensorInput, model: str, top_k: int | None, request_id: str | None
) -> PreparedRequest:
    """The request for one or more images. Raises InputError if `request_id` is invalid."""
    if isinstance(image, FileInput):
        request = body_request(image.content, image.media_type, request_id)
        return request if top_k is None else replace(request, params={"top_k": top_k})
    tensor = describe("input", image.datatype, image.shape, image.content)
    output = {"name": "probabilities", "parameters": {"classification": top_k or 5}}
    head = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
    return tensor_request(model, head, image.content, request_id)


def body_request(body: bytes, content_type: str, request_id: str | None) -> PreparedRequest:
    """The request for /predict. Raises InputError if `request_id` is invalid."""
    return PreparedRequest("/predict", body, _id_header(request_id) | {"Content-Type": content_type})


def describe(name: str, datatype: str, shape: Sequence[int], content: bytes) -> dict[str, Any]:
    """The description of an input whose content follows as binary data."""
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(content)}}


def tensor_request(model: str, head: bytes, content: bytes, request_id: str | None) -> PreparedRequest:
    """A request of the Open Inference Protocol with binary data. Raises InputError if `request_id` is invalid."""
    headers = _id_header(request_id) | {
        "Inference-Header-Content-Length": str(len(head)),
        "Content-Type": "application/octet-stream",
    }
    return PreparedRequest(f"/v2/models/{quote(model, safe='')}/infer", head + content, headers)


def _id_header(request_id: str | None) -> dict[str, str]:
    if request_id is not None and not _ID.fullmatch(request_id):
        raise InputError(
            f"invalid request id {request_id[:140]!r}: expected 1 to 128 printable ASCII characters without spaces"
        )
    return {"X-Request-Id": request_id or uuid.uuid4().hex}


def predictions(response: httpx.Response, tries: int) -> list[Prediction]:
    """Parse a successful answer: one prediction per image. Raises ProtocolError if it cannot be parsed."""
    try:
        body = response.json()
        labels = _labels_of_predict(body) if "predictions" in body else _labels_of_infer(body)
        model = str(body["model"] if "predictions" in body else body["model_name"])
        headers = response.headers
        path = tuple(unquote(world) for world in headers["x-path"].partition(";")[0].split(","))
        common = (model, unquote(headers["x-model-version"]), headers["x-request-id"], path, int(headers["x-attempts"]))
        return [Prediction(each, *common, tries) for each in labels]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise protocol_error(response, error) from error


def model_name(response: httpx.Response) -> str:
    """The model's name from the answer to POST /v2/repository/index. Raises ProtocolError if it cannot be parsed."""
    try:
        return str(response.json()[0]["name"])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise protocol_error(response, error) from error


def protocol_error(response: httpx.Response, error: Exception) -> ProtocolError:
    """The error for an answer that cannot be parsed."""
    return ProtocolError(
        f"the answer from {response.url} is not from a multiworld service ({error!r}); check the URL of the client"
    )


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
