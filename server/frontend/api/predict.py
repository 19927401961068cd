"""POST /predict: classifies one image and returns the most probable classes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from multiworld_serving.common.service.errors import InvalidParameterError, MediaTypeError, StageError, WrongPathError
from multiworld_serving.common.service.predictor import Prediction, ServedModel
from multiworld_serving.server.frontend.api.form import FIELD, extract_image
from multiworld_serving.server.frontend.api.images import LargeImageError, decodes_quickly
from multiworld_serving.server.frontend.api.inference import Inference, InferRequest, prediction_headers
from multiworld_serving.server.frontend.http.route import Endpoint, client_timeout_s, query_parameters
from multiworld_serving.server.frontend.observability.requests import RequestRecord

IMAGE_TYPES = ("image/jpeg", "image/png", "image/webp")
_OTHER_IMAGE_TYPES = ("image/jpg", "application/octet-stream", "")
"""Accepted, too: the content decides."""
FORM_TYPE = "multipart/form-data"


def wrong_path(model: ServedModel) -> Endpoint:
    """POST /predict of a model that does not classify images: tells where to send requests."""

    async def endpoint(_: Request) -> Response:
        missing = "labels" if model.image is not None else "an image as its input"
        raise WrongPathError(
            f"/predict classifies images, and the model {model.name!r} does not have {missing}; send its inputs to "
            f"/v2/models/{model.name}/infer (described by GET /v2/models/{model.name}), or start the service with --handler"
        )

    return endpoint


@dataclass(frozen=True)
class PredictRoute:
    """The route POST /predict of a model that classifies images, and its dependencies."""

    inference: Inference

    async def answer(self, request: Request) -> Response:
        """Classify one image: JPEG, PNG or WebP, as the field `image` of a form or as the body itself."""
        content_type, inference, top_k = _supported_content_type(request), self.inference, self._top_k(request)
        record = RequestRecord.of(request.scope)
        async with inference.open(record, request.receive, client_timeout_s(request)) as opened:
            body = await opened.body(request.headers)
            await opened.admit()
            if decodes_quickly(body):
                rows = self._decode(body, content_type)
            else:
                rows = await inference.threads.run(partial(self._decode, body, content_type))
            asked = InferRequest(rows)
            del body, rows
            prediction = await inference.predict(opened, asked)
            return self._response(prediction, record, top_k)

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

    def _decode(self, body: bytes, content_type: str) -> Tensor | list[bytes]:
        file = extract_image(body, content_type) if _media_type(content_type) == FORM_TYPE else body
        try:
            return self.inference.decode_image(file)[None]
        except LargeImageError:
            return [file]

    def _response(self, prediction: Prediction, record: RequestRecord, top_k: int) -> Response:
        """The fields are those of `PredictResponse` in openapi.json."""
        now_s, model = time.monotonic(), self.inference.signature.model
        best = torch.topk(prediction.output[0], top_k)
        probabilities = best.values.tolist()
        if not all(map(math.isfinite, probabilities)):  # tens of microseconds faster than with torch
            raise StageError("the model returned probabilities that are not finite for this image; check the weights")
        body = msgspec.json.encode(
            {
                "id": record.request_id,
                "model": prediction.model,
                "version": prediction.version,
                "predictions": [
                    {"label": model.labels[class_id], "class_id": class_id, "probability": probability}
                    for class_id, probability in zip(best.indices.tolist(), probabilities, strict=True)
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
        return Response(body, media_type="application/json", headers=prediction_headers(prediction))


def _supported_content_type(request: Request) -> str:
    """The content type if it is supported, checked before the body is read. Raises MediaTypeError if it is not."""
    content_type = request.headers.get("content-type", "")
    if _media_type(content_type) not in (FORM_TYPE, *IMAGE_TYPES, *_OTHER_IMAGE_TYPES):
        given = f"the content type {content_type[:64]!r} is not supported"
        raise MediaTypeError(f"{given}; send {FORM_TYPE} with the field {FIELD!r}, or one of {', '.join(IMAGE_TYPES)}")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise MediaTypeError(
            f"the content encoding {encoding[:64]!r} is not supported here; send the image uncompressed"
        )
    return content_type


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
