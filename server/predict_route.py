"""POST /predict: one image in, the most probable classes out."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Header, Query
from fastapi.responses import Response
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import Request
from torch import Tensor

from server.answer_headers import HEADER_DOCUMENTATION, answer_headers
from server.body import BodyReader, shortened
from server.connection import LATE_S, while_connected
from server.decode_pool import DecodePool
from server.errors import MediaTypeError, StageError
from server.form import FIELD, form_image
from server.http_errors import error_documentation
from server.images import image_tensor
from server.predictor import Predictor, ServedModel
from server.request_record import RequestRecord
from server.v2.statistics import Inference

IMAGE_TYPES = ("image/jpeg", "image/png", "image/webp")
FORM_TYPE = "multipart/form-data"


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)] | SkipJsonSchema[None]
"""A header may be missing, but never be the text "null"."""


class Prediction(BaseModel):
    """One class, and how probable it is."""

    label: str
    class_id: int = Field(ge=0)
    probability: float = Field(ge=0, le=1)


class Timings(BaseModel):
    """Where the time went, in milliseconds."""

    total: float = Field(description="From the request's arrival to its answer, reading the body included.")
    decode: float = Field(description="Decoding, scaling and cropping the image; waiting for a thread included.")
    queue: float = Field(description="Waiting in the leader, all stages together.")
    compute: float = Field(description="Computing on the workers, all stages together.")
    transfer: float = Field(description="On the links between leader and workers, both ways.")


class PredictResponse(BaseModel):
    """The answer for one image."""

    id: str = Field(description="The request id, as in X-Request-Id.")
    model: str
    version: str = Field(description="Which weights answered.")
    predictions: list[Prediction] = Field(description="The most probable classes, the best first.")
    timings_ms: Timings


@dataclass(frozen=True)
class PredictRoute:
    """What answers POST /predict, with all it needs."""

    predictor: Predictor
    model: ServedModel
    bodies: BodyReader
    decoders: DecodePool
    timeout_s: float
    max_image_pixels: int
    exact_images: bool
    top_k: int

    def router(self) -> APIRouter:
        """The route, documented for OpenAPI."""
        num_classes = len(self.model.labels)
        top_k_query = Query(
            min(self.top_k, num_classes), ge=1, le=num_classes, description="How many classes to answer with."
        )
        timeout_header = timeout_parameter(self.timeout_s)
        router = APIRouter(tags=["inference"])

        @router.post(
            "/predict",
            response_model=PredictResponse,
            responses={**_ANSWER_DOCUMENTATION, **error_documentation((408, 413, 415, 422, 429, 500, 503, 504))},
            openapi_extra={"requestBody": _BODY_DOCUMENTATION},
        )
        async def predict(request: Request, top_k: int = top_k_query, timeout_s: Seconds = timeout_header) -> Response:
            """Classify one image: JPEG, PNG or WebP, as the field `image` of a form or as the body itself."""
            return await self._predict(request, top_k, min(self.timeout_s, timeout_s or self.timeout_s))

        return router

    async def _predict(self, request: Request, top_k: int, timeout_s: float) -> Response:
        record = RequestRecord.of(request.scope)
        deadline_s = record.started_s + timeout_s
        with self.predictor.request():
            with shortened(timeout_s, limit_s=self.timeout_s):
                image, decode_s = await self._image(request, deadline_s)
            async with while_connected(request.receive, deadline_s=deadline_s + LATE_S):
                answer = await self.predictor.predict(image, deadline_s=deadline_s, request_id=record.request_id)
        answered_s = time.monotonic()
        record.version = answer.version
        body = PredictResponse(
            id=record.request_id,
            model=answer.model,
            version=answer.version,
            predictions=_most_probable(answer.probabilities, self.model.labels, top_k),
            timings_ms=Timings(
                total=_ms(time.monotonic() - record.started_s),
                decode=_ms(decode_s),
                queue=_ms(answer.queue_s),
                compute=_ms(answer.compute_s),
                transfer=_ms(answer.transfer_s),
            ),
        )
        text = body.model_dump_json()
        record.inference = Inference((answer,), input_s=decode_s, output_s=time.monotonic() - answered_s)
        return Response(text, media_type="application/json", headers=answer_headers((answer,)))

    async def _image(self, request: Request, deadline_s: float) -> tuple[Tensor, float]:
        """The tensor, and the seconds it took to make. The body is let go of here: answers may take long."""
        content_type = _served_type(request)
        async with self.bodies.read(request, deadline_s=deadline_s) as body:
            received_s = time.monotonic()
            await self.predictor.check(deadline_s=deadline_s, ahead=self.decoders.waiting)
            async with while_connected(request.receive, deadline_s=deadline_s):
                image = await self.decoders.run(partial(self._decode, body, content_type))
        return image, time.monotonic() - received_s

    def _decode(self, body: bytes, content_type: str) -> Tensor:
        return image_tensor(
            form_image(body, content_type) if _media_type(content_type) == FORM_TYPE else body,
            resize_size=self.model.resize_size,
            crop_size=self.model.crop_size,
            max_pixels=self.max_image_pixels,
            exact=self.exact_images,
        )


def timeout_parameter(limit_s: float) -> Any:
    """The header by which a client says how long it waits."""
    return Header(
        None,
        alias="X-Request-Timeout-S",
        description=f"Seconds the client waits; can only shorten the server's {limit_s:g}.",
    )


def _served_type(request: Request) -> str:
    """The content type, when it is one of those served; told before the body is read."""
    content_type = request.headers.get("content-type", "")
    if _media_type(content_type) not in (FORM_TYPE, *IMAGE_TYPES):
        given = f"the content type {content_type[:64]!r} is not served" if content_type else "there is no content type"
        raise MediaTypeError(f"{given}; send {FORM_TYPE} with the field {FIELD!r}, or one of {', '.join(IMAGE_TYPES)}")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise MediaTypeError(f"the content encoding {encoding[:64]!r} is not served here; send the image as it is")
    return content_type


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _most_probable(probabilities: Tensor, labels: tuple[str, ...], top_k: int) -> list[Prediction]:
    best = torch.topk(probabilities, top_k)
    values, classes = best.values.tolist(), best.indices.tolist()
    if not all(map(math.isfinite, values)):
        raise StageError("the model gave no finite probabilities for this image; check the weights")
    return [
        Prediction(label=labels[class_id], class_id=class_id, probability=probability)
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
_ANSWER_DOCUMENTATION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The most probable classes.",
        "headers": HEADER_DOCUMENTATION,
    }
}
