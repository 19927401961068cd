"""POST …/infer: computes one or more samples; returns the outputs, or the most probable classes of each."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fastapi.responses import Response
from starlette.requests import Request
from torch import Tensor

from multiworld_serving.server.api.decode_pool import DecodePool
from multiworld_serving.server.api.images import image_tensor
from multiworld_serving.server.api.oip.compression import accepted_encoding, content_encoding, pack, unpack
from multiworld_serving.server.api.oip.image_input import Image
from multiworld_serving.server.api.oip.infer_request import InferRequest, parse_infer_request
from multiworld_serving.server.api.oip.infer_response import HEADER_LENGTH, EncodedResponse, build_response
from multiworld_serving.server.api.oip.metadata import Signature
from multiworld_serving.server.api.response_headers import prediction_headers
from multiworld_serving.server.api.samples import predict_samples
from multiworld_serving.server.errors import InferenceRequestError, UnknownModelError
from multiworld_serving.server.http.body import BodyReader, translate_body_timeout
from multiworld_serving.server.http.disconnect import DEADLINE_GRACE_S, while_connected
from multiworld_serving.server.observability.inference_statistics import Inference
from multiworld_serving.server.observability.request_record import RequestRecord
from multiworld_serving.server.predictor import Prediction, Predictor

_LARGE_RESPONSE_BYTES = 1 << 16
"""Serializing a response with more bytes of outputs takes milliseconds, so it runs on a thread and not on the event loop."""


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
            RequestRejected: at least one sample was rejected, and so the whole request is.
        """
        record = RequestRecord.of(request.scope)
        timeout_s = min(self.timeout_s, timeout_s or self.timeout_s)
        with self.predictor.request():
            with translate_body_timeout(timeout_s, limit_s=self.timeout_s):
                asked, rows, deadline_s = await self._rows(request, record.started_s + timeout_s)
            prepared_s = time.monotonic()
            async with while_connected(request.receive, deadline_s=deadline_s + DEADLINE_GRACE_S):
                predictions = await predict_samples(
                    self.predictor, rows, asked.key, deadline_s=deadline_s, request_id=record.request_id
                )
        if version is not None and version != predictions[0].version_number:
            raise UnknownModelError(
                f"version {version} was replaced by {predictions[0].version_number} while the request was in flight"
            )
        record.version = predictions[0].version
        predicted_s = time.monotonic()
        response = await self._response(request, predictions, asked)
        input_s = prepared_s - record.received_s
        record.inference = Inference(predictions, input_s=input_s, output_s=time.monotonic() - predicted_s)
        return response

    async def _rows(self, request: Request, deadline_s: float) -> tuple[InferRequest, list[Tensor], float]:
        """Read and decode the body; returns what was asked, the input rows and the deadline. Frees the body before the prediction."""
        record = RequestRecord.of(request.scope)
        encoding = content_encoding(request.headers.get("content-encoding"))
        json_bytes = _json_bytes(request)
        async with self.bodies.read(request, deadline_s=deadline_s, allow_empty=True) as body:
            record.received_s = time.monotonic()
            await self.predictor.check(deadline_s=deadline_s, ahead=self.decoders.waiting)
            async with while_connected(request.receive, deadline_s=deadline_s):
                asked = await self.decoders.run(partial(self._parse, body, encoding, json_bytes))
                record.adopt_client_id(asked.id or "")
                if asked.timeout_s is not None:
                    deadline_s = min(deadline_s, record.started_s + asked.timeout_s)
                await self.predictor.check(deadline_s=deadline_s, ahead=self.decoders.waiting + len(asked.rows) - 1)
                with self.bodies.reserve(self._row_bytes(asked.rows), already_held=len(body)):
                    rows = [await self._decoded(row) for row in asked.rows]
        return replace(asked, rows=()), rows, deadline_s

    def _parse(self, body: bytes, encoding: str | None, json_bytes: int | None) -> InferRequest:
        plain = body if encoding is None else unpack(body, encoding, self.bodies.max_body_bytes)
        return parse_infer_request(plain, json_bytes, self.signature)

    def _row_bytes(self, rows: Sequence[Image]) -> int:
        """Bytes held for the rows until all images are decoded."""
        decoded = self.signature.model.input_rows.max_row_bytes
        return sum(len(row) + decoded if isinstance(row, bytes) else row.nbytes for row in rows)

    async def _decoded(self, image: Image) -> Tensor:
        """Decode one image. A request decodes one image at a time, so that others wait for one image and not for a batch."""
        if isinstance(image, Tensor):
            return image
        sizes = self.signature.model.image
        assert sizes is not None, "only models of images take files"
        return await self.decoders.run(
            partial(
                image_tensor,
                image,
                resize_size=sizes.resize_size,
                crop_size=sizes.crop_size,
                max_pixels=self.max_image_pixels,
                exact=self.exact_images,
            )
        )

    async def _response(self, request: Request, predictions: Sequence[Prediction], asked: InferRequest) -> Response:
        encoding = accepted_encoding(request.headers.get("accept-encoding"))
        make = partial(_encode_response, predictions, asked, self.signature, encoding)
        long = sum(prediction.output.nbytes for prediction in predictions) > _LARGE_RESPONSE_BYTES
        encoded, body = await asyncio.to_thread(make) if long else make()
        headers = prediction_headers(predictions) | {"Vary": "Accept-Encoding"}
        if encoded.json_bytes is not None:
            headers[HEADER_LENGTH] = str(encoded.json_bytes)
        if encoding is not None:
            headers["Content-Encoding"] = encoding
        return Response(body, media_type=encoded.media_type, headers=headers)


def _encode_response(
    predictions: Sequence[Prediction], asked: InferRequest, signature: Signature, encoding: str | None
) -> tuple[EncodedResponse, bytes]:
    encoded = build_response(predictions, asked.outputs, asked.id, signature)
    return encoded, encoded.body if encoding is None else pack(encoded.body, encoding)


def _json_bytes(request: Request) -> int | None:
    given = request.headers.get(HEADER_LENGTH)
    if given is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", given):
        raise InferenceRequestError(f"{HEADER_LENGTH} is {given[:64]!r}; expected a number of bytes")
    return int(given)
