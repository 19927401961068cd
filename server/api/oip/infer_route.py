"""POST …/infer: classifies one or more images; returns the probabilities or the most probable classes of each."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fastapi.responses import Response
from starlette.requests import Request
from torch import Tensor

from multiworld_serving.server.api.decode_pool import DecodePool
from multiworld_serving.server.api.images import image_tensor
from multiworld_serving.server.api.oip.compression import accepted_encoding, content_encoding, pack, unpack
from multiworld_serving.server.api.oip.infer_request import InferRequest, OutputOptions, parse_infer_request
from multiworld_serving.server.api.oip.infer_response import HEADER_LENGTH, EncodedResponse, build_response
from multiworld_serving.server.api.oip.metadata import Signature
from multiworld_serving.server.api.oip.tensors import Image
from multiworld_serving.server.api.response_headers import prediction_headers
from multiworld_serving.server.errors import InferenceRequestError, UnknownModelError
from multiworld_serving.server.http.body import BodyReader, translate_body_timeout
from multiworld_serving.server.http.disconnect import DEADLINE_GRACE_S, while_connected
from multiworld_serving.server.observability.inference_statistics import Inference
from multiworld_serving.server.observability.request_record import RequestRecord
from multiworld_serving.server.predictor import Prediction, Predictor

_LARGE_RESPONSE_VALUES = 16_384
"""Serializing a response with more numbers takes milliseconds, so it runs on a thread and not on the event loop."""


@dataclass(frozen=True)
class InferRoute:
    """The inference route and its dependencies; shares its limits with POST /predict."""

    predictor: Predictor
    signature: Signature
    bodies: BodyReader
    decoders: DecodePool
    timeout_s: float
    max_image_pixels: int
    exact_images: bool

    async def infer(self, request: Request, timeout_s: float | None, version: int | None = None) -> Response:
        """Handle a request whose model and version were checked.

        Args:
            timeout_s: the client's timeout from the request header.
            version: number of the version that the client requires; None = any.
        Raises:
            RequestRejected: at least one image was rejected, and so the whole request is.
        """
        record = RequestRecord.of(request.scope)
        timeout_s = min(self.timeout_s, timeout_s or self.timeout_s)
        with self.predictor.request():
            with translate_body_timeout(timeout_s, limit_s=self.timeout_s):
                wanted, images, deadline_s = await self._images(request, record.started_s + timeout_s)
            prepared_s = time.monotonic()
            async with while_connected(request.receive, deadline_s=deadline_s + DEADLINE_GRACE_S):
                predictions = await self._predict_with_one_version(images, deadline_s, record.request_id)
        if version is not None and version != predictions[0].version_number:
            raise UnknownModelError(
                f"version {version} was replaced by {predictions[0].version_number} while the request was in flight"
            )
        record.version = predictions[0].version
        predicted_s = time.monotonic()
        response = await self._response(request, predictions, wanted)
        input_s = prepared_s - record.received_s
        record.inference = Inference(predictions, input_s=input_s, output_s=time.monotonic() - predicted_s)
        return response

    async def _images(self, request: Request, deadline_s: float) -> tuple[OutputOptions, list[Tensor], float]:
        """Read and decode the body; returns output options, images and deadline. Frees the body before the prediction."""
        record = RequestRecord.of(request.scope)
        encoding = content_encoding(request.headers.get("content-encoding"))
        json_bytes = _json_bytes(request)
        async with self.bodies.read(request, deadline_s=deadline_s, allow_empty=True) as body:
            record.received_s = time.monotonic()
            await self.predictor.check(deadline_s=deadline_s, ahead=self.decoders.waiting)
            async with while_connected(request.receive, deadline_s=deadline_s):
                asked = await self.decoders.run(partial(self._parse, body, encoding, json_bytes))
                record.adopt_client_id(asked.output.id or "")
                if asked.timeout_s is not None:
                    deadline_s = min(deadline_s, record.started_s + asked.timeout_s)
                await self.predictor.check(deadline_s=deadline_s, ahead=self.decoders.waiting + len(asked.images) - 1)
                with self.bodies.reserve(self._image_bytes(asked.images), already_held=len(body)):
                    images = [await self._decoded(image) for image in asked.images]
        return asked.output, images, deadline_s

    def _parse(self, body: bytes, encoding: str | None, json_bytes: int | None) -> InferRequest:
        plain = body if encoding is None else unpack(body, encoding, self.bodies.max_body_bytes)
        return parse_infer_request(plain, json_bytes, self.signature)

    def _image_bytes(self, images: Sequence[Image]) -> int:
        """Bytes held for the images until all are decoded."""
        files = sum(len(image) for image in images if isinstance(image, bytes))
        return files + len(images) * self.signature.image_values

    async def _decoded(self, image: Image) -> Tensor:
        """Decode one image. A request decodes one image at a time, so that others wait for one image and not for a batch."""
        if isinstance(image, Tensor):
            return image
        model = self.signature.model
        return await self.decoders.run(
            partial(
                image_tensor,
                image,
                resize_size=model.resize_size,
                crop_size=model.crop_size,
                max_pixels=self.max_image_pixels,
                exact=self.exact_images,
            )
        )

    async def _predict_with_one_version(
        self, images: Sequence[Tensor], deadline_s: float, request_id: str
    ) -> list[Prediction]:
        """Predict all images with the same version: if it changes meanwhile, repeat the images of the old one."""
        predictions = await self._predict_all(images, deadline_s, request_id)
        while len({prediction.version_number for prediction in predictions}) > 1:
            number = self.predictor.version.number
            stale = [at for at, prediction in enumerate(predictions) if prediction.version_number != number]
            fresh = await self._predict_all([images[at] for at in stale], deadline_s, request_id)
            for at, prediction in zip(stale, fresh, strict=True):
                predictions[at] = prediction
        return predictions

    async def _predict_all(self, images: Sequence[Tensor], deadline_s: float, request_id: str) -> list[Prediction]:
        """Predict all images. The first error cancels the others: the request fails as a whole."""
        tasks: list[asyncio.Task[Prediction]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for image in images:
                    predict = self.predictor.predict(image, deadline_s=deadline_s, request_id=request_id)
                    tasks.append(group.create_task(predict))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _response(self, request: Request, predictions: Sequence[Prediction], wanted: OutputOptions) -> Response:
        encoding = accepted_encoding(request.headers.get("accept-encoding"))
        make = partial(_encode_response, predictions, wanted, self.signature, encoding)
        long = len(predictions) * self.signature.num_classes > _LARGE_RESPONSE_VALUES
        encoded, body = await asyncio.to_thread(make) if long else make()
        headers = prediction_headers(predictions) | {"Vary": "Accept-Encoding"}
        if encoded.json_bytes is not None:
            headers[HEADER_LENGTH] = str(encoded.json_bytes)
        if encoding is not None:
            headers["Content-Encoding"] = encoding
        return Response(body, media_type=encoded.media_type, headers=headers)


def _encode_response(
    predictions: Sequence[Prediction], wanted: OutputOptions, signature: Signature, encoding: str | None
) -> tuple[EncodedResponse, bytes]:
    encoded = build_response(predictions, wanted, signature)
    return encoded, encoded.body if encoding is None else pack(encoded.body, encoding)


def _json_bytes(request: Request) -> int | None:
    given = request.headers.get(HEADER_LENGTH)
    if given is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", given):
        raise InferenceRequestError(f"{HEADER_LENGTH} is {given[:64]!r}; expected a number of bytes")
    return int(given)
