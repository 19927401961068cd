"""POST /predict: classifies one image and returns the most probable classes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec
import torch
from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import BaseModel, Field
from starlette.requests import Request
from torch import Tensor

from multiworld_serving.server.api.form import FIELD, extract_image
from multiworld_serving.server.api.inference import (
    HEADER_DOCUMENTATION,
    Inference,
    InferRequest,
    prediction_headers,
)
from multiworld_serving.server.errors import MediaTypeError, StageError, WrongPathError
from multiworld_serving.server.http.errors import error_documentation
from multiworld_serving.server.http.inference_route import Seconds, inference_router, timeout_parameter
from multiworld_serving.server.http.open_request import OpenRequest
from multiworld_serving.server.observability.requests import RequestRecord
from multiworld_serving.server.predictor import Prediction, ServedModel

IMAGE_TYPES = ("image/jpeg", "image/png", "image/webp")
FORM_TYPE = "multipart/form-data"


class ClassProbability(BaseModel):
    """One class and its probability."""

    label: str
    class_id: int = Field(ge=0)
    probability: float = Field(ge=0, le=1)


class Timings(BaseModel):
    """Time spent in each phase, in milliseconds."""

    total: float = Field(description="From the request's arrival to its response, including reading the body.")
    decode: float = Field(description="Decoding, scaling and cropping the image, including waiting for a thread.")
    queue: float = Field(description="Waiting in the leader, all stages together.")
    compute: float = Field(description="Computing on the workers, all stages together.")
    transfer: float = Field(description="On the links between leader and workers, both directions.")


class PredictResponse(BaseModel):
    """The response for one image."""

    id: str = Field(description="The request id, as in X-Request-Id.")
    model: str
    version: str = Field(description="Version of the weights.")
    predictions: list[ClassProbability] = Field(description="The most probable classes in descending order.")
    timings_ms: Timings


@dataclass(frozen=True)
class NoPredictRoute:
    """POST /predict of a model that does not classify images: tells where to send requests."""

    summary: ClassVar[str] = ""
    model: ServedModel

    def router(self) -> APIRouter:
        """The route, not documented for OpenAPI."""
        router = APIRouter()

        @router.post("/predict", include_in_schema=False)
        async def predict() -> Response:
            missing = "labels" if self.model.image is not None else "an image as its input"
            raise WrongPathError(
                f"/predict classifies images, and the model {self.model.name!r} does not have {missing}; send its inputs to "
                f"/v2/models/{self.model.name}/infer (described by GET /v2/models/{self.model.name}), or start the service with --handler"
            )

        return router


@dataclass(frozen=True)
class PredictRoute:
    """The route POST /predict of a model that classifies images, and its dependencies."""

    summary: ClassVar[str] = "classify an image: curl -F image=@photo.jpg http://HOST:PORT/predict"
    """For the list of endpoints."""
    inference: Inference

    def router(self) -> APIRouter:
        """The route, documented for OpenAPI."""
        labels, limits = len(self.inference.signature.model.labels), self.inference.gate.limits
        top_k_query = Query(
            min(limits.top_k, labels), ge=1, le=labels, description="Number of classes in the response."
        )
        timeout_header = timeout_parameter(limits.timeout_s)
        router = inference_router("inference")

        @router.post(
            "/predict",
            response_model=PredictResponse,
            responses={**_RESPONSE_DOCUMENTATION, **error_documentation((408, 413, 415, 422, 429, 500, 503, 504))},
            openapi_extra={"requestBody": _BODY_DOCUMENTATION},
        )
        async def predict(request: Request, top_k: int = top_k_query, timeout_s: Seconds = timeout_header) -> Response:
            """Classify one image: JPEG, PNG or WebP, as the field `image` of a form or as the body itself."""
            content_type, inference = _supported_content_type(request), self.inference
            opened = OpenRequest(inference.gate, RequestRecord.of(request.scope), request.receive, timeout_s)

            async def parse(body: bytes) -> InferRequest:
                return InferRequest(await inference.threads.run(partial(self._decode, body, content_type)))

            async def encode(prediction: Prediction, _: InferRequest) -> Response:
                return self._response(prediction, opened.record, top_k)

            return await inference.answer(opened, partial(opened.body, request.headers), parse, encode)

        return router

    def _decode(self, body: bytes, content_type: str) -> Tensor:
        is_form = _media_type(content_type) == FORM_TYPE
        return self.inference.decode_image(extract_image(body, content_type) if is_form else body)[None]

    def _response(self, prediction: Prediction, record: RequestRecord, top_k: int) -> Response:
        """The fields are those of `PredictResponse`."""
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
    if _media_type(content_type) not in (FORM_TYPE, *IMAGE_TYPES):
        given = (
            f"the content type {content_type[:64]!r} is not supported" if content_type else "there is no content type"
        )
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


_BINARY = {"type": "string", "format": "binary"}
_BODY_DOCUMENTATION: dict[str, Any] = {
    "required": True,
    "content": {
        FORM_TYPE: {
            "schema": {
                "type": "object",
                "properties": {FIELD: _BINARY},
                "required": [FIELD],
                "additionalProperties": False,
            }
        },
        **{image_type: {"schema": _BINARY} for image_type in IMAGE_TYPES},
    },
}
_RESPONSE_DOCUMENTATION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The most probable classes.",
        "headers": HEADER_DOCUMENTATION,
    }
}
