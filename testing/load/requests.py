"""Requests for the served model, whatever it is, with the answers that the service gives without load or faults."""

import itertools
import math
import mimetypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np

from multiworld_client.codec import infer_request, outputs
from multiworld_client.errors import ProtocolError
from multiworld_serving.common.config.client_options import NO_CREDENTIALS
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.testing.load.images import photos

_TOLERANCE = 1e-2
"""Relative tolerance of numbers. Batch sizes change them by 1e-6 to 1e-4; another input by far more."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_COUNT = 8
"""Number of different requests that are generated."""
_MAX_LENGTH = 1024
"""Largest generated length of a dimension that varies."""


@dataclass(frozen=True, slots=True)
class ReferenceRequest:
    """A request with its expected answer, as recorded from the service without load or faults.

    Attributes:
        expected: see `answer_values`; empty accepts any answer.
        path: URL path.
        more_headers: headers beside the content type.
    """

    body: bytes
    content_type: str = "image/jpeg"
    expected: Mapping[Any, Any] = field(default_factory=dict)
    path: str = "/predict"
    more_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """Headers that describe the body."""
        return {"content-type": self.content_type, **self.more_headers}

    def find_error(self, answer: httpx.Response, request_id: str) -> str:
        """Return why this is not a correct response to the request with this id; empty if it is."""
        if answer.status_code != 200:
            return answer.text[:200]
        if (found := answer.headers.get("x-request-id")) != request_id:
            return f"the answer of another request: {found}"
        try:
            return self.find_mismatch(answer_values(answer)) if self.expected else ""
        except (ValueError, KeyError, TypeError, ProtocolError) as error:
            return f"not an answer: {error!r}"

    def find_mismatch(self, values: Mapping[Any, Any]) -> str:
        """Return how these values differ from the expected ones; empty if they do not."""
        # Classes with nearly equal probabilities may swap ranks, so the last one may be missing.
        floor = min((value for value in values.values() if isinstance(value, float)), default=0.0)
        for name, expected in self.expected.items():
            found = values.get(name, floor)
            if isinstance(expected, np.ndarray):
                scale = float(np.abs(expected).max(initial=0)) if expected.size else 0.0
                if np.shape(found) != expected.shape or not np.allclose(
                    found, expected, rtol=0, atol=_TOLERANCE * scale, equal_nan=True
                ):
                    return f"wrong answer: the output {name!r} differs"
            elif isinstance(expected, float):
                if abs(found - expected) > _TOLERANCE * max(expected, 1e-6):
                    return f"wrong answer: class {name} has probability {found:.6g}, expected {expected:.6g}"
            elif not _equal_texts(str(found), expected):
                return f"wrong answer: {found!r:.80}, expected {expected!r:.80}"
        return ""


def answer_values(answer: httpx.Response) -> dict[Any, Any]:
    """The values of a successful response: arrays by output, probabilities by class, or the text of a handler's body."""
    if "inference-header-content-length" in answer.headers:
        return outputs(answer)
    if answer.headers.get("content-type") == "application/json" and "predictions" in (body := answer.json()):
        return {int(each["class_id"]): float(each["probability"]) for each in body["predictions"]}
    return {"body": answer.text}


def _equal_texts(one: str, other: str) -> bool:
    """Whether two texts are equal but for small differences of the numbers in them."""
    if _NUMBER.sub("0", one) != _NUMBER.sub("0", other):
        return False
    numbers = zip(map(float, _NUMBER.findall(one)), map(float, _NUMBER.findall(other)), strict=True)
    return all(math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-6) for a, b in numbers)


def body_file(path: Path) -> tuple[bytes, str]:
    """Read the body of a request. Returns it with the content type that its name suggests. Raises UserError."""
    try:
        return path.read_bytes(), mimetypes.guess_type(path.name, strict=False)[0] or "application/octet-stream"
    except OSError as error:
        raise UserError(f"--file {path}: cannot be read: {error.strerror}") from error


def served_requests(
    url: str,
    files: Sequence[tuple[bytes, str]] = (),
    *,
    model: str | None = None,
    rows: int | None = None,
    seed: int = 0,
    credentials: Mapping[str, Any] = NO_CREDENTIALS,
) -> list[ReferenceRequest]:
    """Return requests for the model that the service serves. Each was sent alone, and its answer is the expected one.

    Args:
        files: bodies and content types for /predict. Without them, requests are generated: images if the service classifies images,
            else tensors by the metadata of the model.
        model: to which they are sent; None = the only one, or the first one.
        rows: rows of each request with tensors; None sends images if the service classifies them, else one row.
    Raises:
        httpx.HTTPError: a request failed.
        UserError: `rows` exceeds the limit of the service, or the model has inputs that cannot be generated.
    """
    with httpx.Client(base_url=url, timeout=60.0, **credentials) as client:
        path = "/predict" if model is None else f"/predict/{quote(model)}"
        requests = [ReferenceRequest(*body, path=path) for body in files] or _generated(client, model, rows, seed)
        return [_recorded(client, request) for request in requests]


def _generated(client: httpx.Client, model: str | None, rows: int | None, seed: int) -> list[ReferenceRequest]:
    names = client.get("/v2/models").raise_for_status().json()["models"]
    name = quote(model or names[0])
    path = "/predict" if len(names) == 1 else f"/predict/{name}"
    metadata = client.get(f"/v2/models/{name}").raise_for_status().json()
    if not metadata["inputs"]:
        raise UserError(f"the inputs of the model {name} are not described: give the bodies of requests with --file")
    parameters = metadata["parameters"]
    images = photos(_COUNT, seed)
    if rows is None and "input_datatypes" in parameters and _classifies(client, path, images[0]):
        return [ReferenceRequest(*image, path=path) for image in images]
    if (rows or 1) > int(parameters["max_rows"]):
        raise UserError(f"--rows {rows}: the service takes at most {parameters['max_rows']} rows in a request")
    generator = np.random.default_rng(seed)
    return [_tensor_request(metadata, rows or 1, generator) for _ in range(_COUNT)]


def _classifies(client: httpx.Client, path: str, image: tuple[bytes, str]) -> bool:
    answer = client.post(path, content=image[0], headers={"content-type": image[1]})
    return (
        answer.is_success
        and answer.headers.get("content-type") == "application/json"
        and "predictions" in answer.json()
    )


def _tensor_request(metadata: dict[str, Any], rows: int, generator: np.random.Generator) -> ReferenceRequest:
    """A request with random rows. All dimensions that vary get one length, because inputs may share them."""
    parameters = metadata["parameters"]
    ranges = [value.split("..") for name, value in parameters.items() if name.startswith("dimension.")]
    low, high = max((int(low) for low, _ in ranges), default=1), min((int(high) for _, high in ranges), default=1)
    if low > high:
        raise UserError(
            "the dimensions of this model have no length in common: give the bodies of requests with --file"
        )
    length = int(generator.integers(low, min(high, max(low, _MAX_LENGTH)), endpoint=True))
    inputs = {}
    for tensor in metadata["inputs"]:
        datatype = "UINT8" if "UINT8" in parameters.get("input_datatypes", "") else tensor["datatype"]
        shape = (rows, *(length if size < 0 else size for size in tensor["shape"][1:]))
        inputs[tensor["name"]] = _random(datatype, shape, generator)
    prepared = infer_request(inputs, metadata["name"], None)
    headers = {name.lower(): value for name, value in prepared.headers.items() if name != "X-Request-Id"}
    return ReferenceRequest(prepared.content, headers.pop("content-type"), path=prepared.path, more_headers=headers)


def _random(datatype: str, shape: tuple[int, ...], generator: np.random.Generator) -> Any:
    """Random values: pixels, small indices that every vocabulary has, booleans, or normally distributed numbers."""
    if datatype == "UINT8":
        return generator.integers(0, 256, shape, dtype=np.uint8)
    if datatype.startswith("INT"):
        return generator.integers(0, 10, shape).astype(datatype.lower())
    if datatype == "BOOL":
        return generator.integers(0, 2, shape).astype(bool)
    numbers = generator.standard_normal(shape, dtype=np.float32)
    if datatype == "BF16":
        import torch  # noqa: PLC0415 - numpy has no bfloat16

        return torch.from_numpy(numbers).bfloat16()
    return numbers.astype(datatype.replace("FP", "float"))


def _recorded(client: httpx.Client, request: ReferenceRequest) -> ReferenceRequest:
    answer = client.post(request.path, content=request.body, headers=request.headers).raise_for_status()
    return replace(request, expected=answer_values(answer))


def count_indistinguishable(requests: Sequence[ReferenceRequest]) -> int:
    """Count pairs of requests whose answers are equal within the tolerance: swapping them would not be detected."""
    return sum(not one.find_mismatch(other.expected) for one, other in itertools.combinations(requests, 2))
