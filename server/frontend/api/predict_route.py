"""POST /predict: classifies one image and returns the most probable classes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from python_multipart.multipart import parse_options_header
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from multiworld_serving.common.service.errors import (
    ImageError,
    InvalidBodyError,
    InvalidParameterError,
    MediaTypeError,
    StageError,
    WrongPathError,
)
from multiworld_serving.common.service.predictor import Prediction, ServedModel
from multiworld_serving.server.frontend.api.images import LargeImageError, quick_jpeg
from multiworld_serving.server.frontend.api.inference import Inference, InferRequest, JsonResponse
from multiworld_serving.server.frontend.http.route import Endpoint, header, query_parameters
from multiworld_serving.server.frontend.observability.request_records import RequestRecord

IMAGE_TYPES = ("image/jpeg", "image/png", "image/webp")
_OTHER_IMAGE_TYPES = ("image/jpg", "application/octet-stream", "")
"""Accepted, too: the content decides."""
FORM_TYPE = "multipart/form-data"
FIELD = "image"
"""The form field that contains the file, as in `curl -F image=@photo.jpg`."""

_SMALL_FORM_BYTES = 1 << 14

_EXPECTED = f"send exactly one file, in the field {FIELD!r}; options go into the query string"


def wrong_path(model: ServedModel) -> Endpoint:
    """POST /predict of a model that does not classify images: tells where to send requests."""

    async def endpoint(_: Request) -> Response:
        if model.pipeline is not None:
            raise WrongPathError(f"the model {model.name!r} generates text; send the request to /v1/completions")
        missing = "labels" if model.image is not None else "an image as its input"
        raise WrongPathError(
            f"/predict classifies images, and the model {model.name!r} does not have {missing}; send its inputs to "
            f"/v2/models/{model.name}/infer (described by GET /v2/models/{model.name}), or serve a pipeline in Python"
        )

    return endpoint


@dataclass(frozen=True)
class PredictRoute:
    """The route POST /predict of a model that classifies images, and its dependencies."""

    inference: Inference

    async def answer(self, request: Request) -> Response:
        """Classify one image: JPEG, PNG or WebP, as the field `image` of a form or as the body itself."""
        content_type, inference, top_k = _supported_content_type(request), self.inference, self._top_k(request)
        async with inference.open_http(request) as opened:
            body = await opened.body(request)
            await opened.admit()
            asked = InferRequest(await self._rows(body, content_type))
            del body
            prediction = await inference.predict(opened, asked)
            return self._response(prediction, opened.record, top_k)

    def _top_k(self, request: Request) -> int:
        """The number of classes in the response. Raises InvalidParameterError."""
        labels = len(self.inference.signature.model.labels)
        given = query_parameters(request, ["top_k"]).get("top_k")
        if given is None:
            return min(self.inference.gate.limits.top_k, labels)
        found = int(given) if given.isdecimal() and len(given) < 10 else 0
        if not 1 <= found <= labels:
            raise InvalidParameterError(f"query top_k: expected a number from 1 to {labels}, got {given[:64]!r}")
        return found

    async def _rows(self, body: bytes, content_type: str) -> Tensor | list[bytes]:
        """The decoded image, or the file of a large one."""
        is_form = _media_type(content_type) == FORM_TYPE
        if is_form and len(body) <= _SMALL_FORM_BYTES:
            body, is_form = extract_image(body, content_type), False
        if not is_form and (quick := quick_jpeg(body)) is not None:
            decode = partial(self.inference.decode_image, body, quick=quick)
            return (await self.inference.short_jobs.run(decode))[None]
        return await self.inference.threads.run(partial(self._decode, body, content_type if is_form else None))

    def _decode(self, body: bytes, form: str | None) -> Tensor | list[bytes]:
        file = body if form is None else extract_image(body, form)
        try:
            return self.inference.decode_image(file)[None]
        except LargeImageError:
            return [file]

    def _response(self, prediction: Prediction, record: RequestRecord, top_k: int) -> Response:
        """The fields are those of `PredictResponse` in openapi.json."""
        now_s, model = time.monotonic(), self.inference.signature.model
        best = torch.topk(prediction.output, top_k)
        (probabilities,), (class_ids,) = best.values.tolist(), best.indices.tolist()
        if not all(map(math.isfinite, probabilities)):  # tens of microseconds faster than with torch
            raise StageError("the model returned probabilities that are not finite for this image; check the weights")
        body = msgspec.json.encode(
            {
                "id": record.request_id,
                "model": prediction.model,
                "version": prediction.version,
                "predictions": [
                    {"label": model.labels[class_id], "class_id": class_id, "probability": probability}
                    for class_id, probability in zip(class_ids, probabilities, strict=True)
                ],
                "timings_ms": {
                    "total": _ms(now_s - record.started_s),
                    "decode": _ms(record.input_s),
                    "queue": _ms(prediction.queue_s),
                    "compute": _ms(prediction.compute_s),
                    "transfer": _ms(prediction.transfer_s),
                },
            }
        )
        return JsonResponse(body, prediction)


def _supported_content_type(request: Request) -> str:
    """The content type if it is supported, checked before the body is read. Raises MediaTypeError if it is not."""
    content_type = header(request, b"content-type") or ""
    if _media_type(content_type) not in (FORM_TYPE, *IMAGE_TYPES, *_OTHER_IMAGE_TYPES):
        given = f"the content type {content_type[:64]!r} is not supported"
        raise MediaTypeError(f"{given}; send {FORM_TYPE} with the field {FIELD!r}, or one of {', '.join(IMAGE_TYPES)}")
    encoding = header(request, b"content-encoding")
    if encoding is not None and encoding.strip().lower() != "identity":
        raise MediaTypeError(
            f"the content encoding {encoding[:64]!r} is not supported here; send the image uncompressed"
        )
    return content_type


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def extract_image(body: bytes, content_type: str) -> bytes:
    """Return the bytes of the file in the field `image` of a multipart/form-data body.

    Args:
        body: the whole form, RFC 2046.
        content_type: the request's header, which contains the boundary.
    Raises:
        InvalidBodyError: not a form, truncated, field missing or empty, another field, or more than one file.
        ImageError: the field is text.
    """
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise InvalidBodyError("the content type multipart/form-data has no boundary; let the HTTP client set it")
    # Split at most into the preamble, two parts and the rest, so that a body of many parts takes no memory.
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary, 3)
    if not parts:
        raise InvalidBodyError(f"the body is not a well-formed multipart form; {_EXPECTED}")
    if parts[0].startswith(b"--"):
        raise InvalidBodyError(f"the form has no field {FIELD!r}; {_EXPECTED}")
    image = _image(parts[0])
    if len(parts) == 1:
        raise InvalidBodyError(f"the multipart form is truncated: it has no closing boundary; {_EXPECTED}")
    if not parts[1].startswith(b"--"):
        _image(parts[1])
        raise InvalidBodyError(f"the form has more than one {FIELD!r}; {_EXPECTED}")
    if not image:
        raise InvalidBodyError(f"the file in the field {FIELD!r} is empty; send an image file in it")
    if image.isascii():
        raise ImageError(f"the field {FIELD!r} has text, and not an image; curl needs an @: -F {FIELD}=@PATH")
    return image


def _image(part: bytes) -> bytes:
    """The content of a part. Raises InvalidBodyError unless it is the field `image`."""
    head, separator, content = part.partition(b"\r\n\r\n")
    if not separator:
        raise InvalidBodyError(f"the body is not a well-formed multipart form; {_EXPECTED}")
    name = ""
    for line in head.split(b"\r\n"):
        header, _, value = line.partition(b":")
        if header.strip().lower() == b"content-disposition":
            name = parse_options_header(value.decode("latin-1"))[1].get(b"name", b"").decode("utf-8", "replace")
    if name != FIELD:
        found = f"the field {name[:64]!r}" if name else "a field without a name"
        raise InvalidBodyError(f"the form has {found}; only {FIELD!r} is expected; {_EXPECTED}")
    return content
