"""POST /predict: classifies one image and returns the most probable classes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from fastapi import APIRouter, Header, Query
from fastapi.responses import Response
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import Request
from torch import Tensor

from multiworld_serving.server.api.decode_pool import DecodePool
from multiworld_serving.server.api.form import FIELD, extract_image
from multiworld_serving.server.api.images import image_tensor
from multiworld_serving.server.api.response_headers import HEADER_DOCUMENTATION, prediction_headers
from multiworld_serving.server.errors import MediaTypeError, StageError, WrongPathError
from multiworld_serving.server.http.body import BodyReader, translate_body_timeout
from multiworld_serving.server.http.disconnect import DEADLINE_GRACE_S, while_connected
from multiworld_serving.server.http.errors import error_documentation
from multiworld_serving.server.http.inference_route import TIMEOUT_HEADER, InferenceRoute
from multiworld_serving.server.observability.request_record import Inference, RequestRecord
from multiworld_serving.server.predictor import Predictor, ServedModel

IMAGE_TYPES = ("image/jpeg", "image/png", "image/webp")
FORM_TYPE = "multipart/form-data"


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)] | SkipJsonSchema[None]
"""The header is optional, but the text "null" is not a valid value."""


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
    predictor: Predictor
    model: ServedModel
    bodies: BodyReader
    decoders: DecodePool
    timeout_s: float
    max_image_pixels: int
    top_k: int

    def router(self) -> APIRouter:
        """The route, documented for OpenAPI."""
        top_k_query = Query(
            self._default_top_k, ge=1, le=len(self.model.labels), description="Number of classes in the response."
        )
        timeout_header = timeout_parameter(self.timeout_s)
        router = APIRouter(tags=["inference"], route_class=InferenceRoute)

        @router.post(
            "/predict",
            response_model=PredictResponse,
            responses={**_RESPONSE_DOCUMENTATION, **error_documentation((408, 413, 415, 422, 429, 500, 503, 504))},
            openapi_extra={"requestBody": _BODY_DOCUMENTATION},
        )
        async def predict(request: Request, top_k: int = top_k_query, timeout_s: Seconds = timeout_header) -> Response:
            """Classify one image: JPEG, PNG or WebP, as the field `image` of a form or as the body itself."""
            return await self._predict(request, top_k, min(self.timeout_s, timeout_s or self.timeout_s))

        return router

    @property
    def _default_top_k(self) -> int:
        return min(self.top_k, len(self.model.labels))

    async def _predict(self, request: Request, top_k: int, timeout_s: float) -> Response:
        record = RequestRecord.of(request.scope)
        deadline_s = record.started_s + timeout_s
        with self.predictor.request():
            with translate_body_timeout(timeout_s, limit_s=self.timeout_s):
                image, decode_s = await self._image(request, deadline_s)
            async with while_connected(request.receive, deadline_s=deadline_s + DEADLINE_GRACE_S):
                prediction = await self.predictor.predict(image, deadline_s=deadline_s, request_id=record.request_id)
        predicted_s = time.monotonic()
        record.version = prediction.version
        body = PredictResponse(
            id=record.request_id,
            model=prediction.model,
            version=prediction.version,
            predictions=_top_classes(prediction.output, self.model.labels, top_k),
            timings_ms=Timings(
                total=_ms(time.monotonic() - record.started_s),
                decode=_ms(decode_s),
                queue=_ms(prediction.queue_s),
                compute=_ms(prediction.compute_s),
                transfer=_ms(prediction.transfer_s),
            ),
        )
        text = body.model_dump_json()
        record.inference = Inference((prediction,), input_s=decode_s, output_s=time.monotonic() - predicted_s)
        return Response(text, media_type="application/json", headers=prediction_headers((prediction,)))

    async def _image(self, request: Request, deadline_s: float) -> tuple[Tensor, float]:
        """Read and decode the image; returns the tensor and the seconds this took. Frees the body before the prediction."""
        content_type = _supported_content_type(request)
        async with self.bodies.read(request, deadline_s=deadline_s) as body:
            received_s = time.monotonic()
            await self.predictor.check(deadline_s=deadline_s, ahead=self.decoders.waiting)
            async with while_connected(request.receive, deadline_s=deadline_s):
                image = await self.decoders.run(partial(self._decode, body, content_type))
        return image, time.monotonic() - received_s

    def _decode(self, body: bytes, content_type: str) -> Tensor:
        sizes = self.model.image
        assert sizes is not None, "the model classifies images"
        return image_tensor(
            extract_image(body, content_type) if _media_type(content_type) == FORM_TYPE else body,
            resize_size=sizes.resize_size,
            crop_size=sizes.crop_size,
            max_pixels=self.max_image_pixels,
        )


def timeout_parameter(limit_s: float) -> Any:
    """The header in which a client sends its timeout."""
    return Header(
        None,
        alias=TIMEOUT_HEADER,
        description=f"Timeout in seconds; can only shorten the server's {limit_s:g}.",
    )


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


def _top_classes(probabilities: Tensor, labels: tuple[str, ...], top_k: int) -> list[ClassProbability]:
    best = torch.topk(probabilities, top_k)
    values, classes = best.values.tolist(), best.indices.tolist()
    if not all(map(math.isfinite, values)):
        raise StageError("the model returned probabilities that are not finite for this image; check the weights")
    return [
        ClassProbability(label=labels[class_id], class_id=class_id, probability=probability)
        for class_id, probability in zip(classes, values, strict=True)
    ]


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
