"""What is sent for a picture, and what the answer says: both protocols of the service, without I/O."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

import httpx

from multiworld_client.errors import InputError, ProtocolError
from multiworld_client.inputs import FileInput, TensorInput
from multiworld_client.results import Label, Prediction
from multiworld_client.retries import TimeLeft

_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True)
class Exchange:
    """One request, the same at every try but for the time that is left."""

    path: str
    content: bytes
    headers: Mapping[str, str]
    params: Mapping[str, str | int] = field(default_factory=dict)

    def request(self, http: httpx.Client | httpx.AsyncClient, left: TimeLeft) -> httpx.Request:
        """For one try. The service is told how long somebody waits."""
        headers = {**self.headers, "X-Request-Timeout-S": f"{max(left.seconds, 0.001):.6f}"}
        return http.build_request(
            "POST",
            self.path,
            content=self.content,
            headers=headers,
            params=dict(self.params),
            extensions={"timeout": left},
        )


INDEX = Exchange("/v2/repository/index", b"", {})
"""Asks which model there is."""


def exchange_of(image: FileInput | TensorInput, model: str, top_k: int | None, request_id: str | None) -> Exchange:
    """The request for a picture, or for several. Raises InputError."""
    if request_id is not None and not _ID.fullmatch(request_id):
        raise InputError(f"a request id is 1 to 128 printable characters without spaces, not {request_id[:140]!r}")
    headers = {"X-Request-Id": request_id or uuid.uuid4().hex}
    if isinstance(image, FileInput):
        params = {} if top_k is None else {"top_k": top_k}
        return Exchange("/predict", image.content, headers | {"Content-Type": image.media_type}, params)
    tensor = {
        "name": "input",
        "datatype": image.datatype,
        "shape": image.shape,
        "parameters": {"binary_data_size": len(image.content)},
    }
    output = {"name": "probabilities", "parameters": {"classification": top_k or 5}}
    head = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
    headers |= {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    return Exchange(f"/v2/models/{quote(model, safe='')}/infer", head + image.content, headers)


def predictions(response: httpx.Response, tries: int) -> list[Prediction]:
    """What an answer of success says, a prediction for each picture. Raises ProtocolError when it says something else."""
    try:
        body = response.json()
        labels = _of_predict(body) if "predictions" in body else _of_infer(body)
        model = str(body["model"] if "predictions" in body else body["model_name"])
        headers = response.headers
        path = tuple(unquote(world) for world in headers["x-path"].partition(";")[0].split(","))
        said = (model, unquote(headers["x-model-version"]), headers["x-request-id"], path, int(headers["x-attempts"]))
        return [Prediction(each, *said, tries) for each in labels]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ProtocolError(f"{response.url} answers, but not as a multiworld service does: {error!r}") from error


def model_name(response: httpx.Response) -> str:
    """The served model, by the answer to POST /v2/repository/index. Raises ProtocolError."""
    try:
        return str(response.json()[0]["name"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ProtocolError(f"{response.url} answers, but not as a multiworld service does: {error!r}") from error


def _of_predict(body: Mapping[str, Any]) -> list[tuple[Label, ...]]:
    found = body["predictions"]
    return [tuple(Label(str(each["label"]), int(each["class_id"]), float(each["probability"])) for each in found)]


def _of_infer(body: Mapping[str, Any]) -> list[tuple[Label, ...]]:
    (output,) = body["outputs"]
    images, classes = output["shape"]
    texts = output["data"]
    if len(texts) != images * classes or not texts:
        raise ValueError(f"{len(texts)} classes for {images} pictures")
    labels = [_label(text) for text in texts]
    return [tuple(labels[at : at + classes]) for at in range(0, len(labels), classes)]


def _label(text: str) -> Label:
    """Of "value:index:label"; a label may have colons itself."""
    value, index, label = text.split(":", 2)
    return Label(label, int(index), float(value))
