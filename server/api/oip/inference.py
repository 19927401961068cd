"""The steps of an inference request that HTTP and gRPC share: check, parse, decode, predict, encode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from starlette.types import Receive
from torch import Tensor

from multiworld_serving.server.api.decode_pool import DecodePool
from multiworld_serving.server.api.images import image_tensor
from multiworld_serving.server.api.oip.image_input import Image
from multiworld_serving.server.api.oip.infer_request import InferRequest
from multiworld_serving.server.api.oip.metadata import Signature
from multiworld_serving.server.api.samples import predict_samples
from multiworld_serving.server.errors import UnknownModelError
from multiworld_serving.server.http.body import BodyReader
from multiworld_serving.server.http.disconnect import DEADLINE_GRACE_S, while_connected
from multiworld_serving.server.observability.request_record import Inference, RequestRecord
from multiworld_serving.server.predictor import Prediction, Predictor

T = TypeVar("T")

_LARGE_RESPONSE_BYTES = 1 << 16
"""Serializing a response with more bytes of outputs takes milliseconds, so it runs on a thread and not on the event loop."""


@dataclass(frozen=True)
class PreparedRequest:
    """A request whose body is not needed any more.

    Attributes:
        asked: without its rows.
        rows: the input rows of the model.
        deadline_s: by `time.monotonic()`.
    """

    asked: InferRequest
    rows: Sequence[Tensor]
    deadline_s: float


@dataclass(frozen=True)
class OipInference:
    """Computes inference requests of the protocol. Shares its limits with POST /predict."""

    predictor: Predictor
    signature: Signature
    bodies: BodyReader
    decoders: DecodePool
    timeout_s: float
    max_image_pixels: int

    async def prepare(
        self,
        parse: Callable[[], InferRequest],
        body_bytes: int,
        record: RequestRecord,
        *,
        deadline_s: float,
        receive: Receive | None = None,
    ) -> PreparedRequest:
        """Parse a body that was received, and decode its images. The caller keeps the body counted as held meanwhile.

        Args:
            parse: runs on a decoding thread.
            receive: see `while_connected`.
        Raises:
            RequestRejected: the request is invalid, or would be refused now.
        """
        record.received_s = time.monotonic()
        await self.predictor.check(deadline_s=deadline_s, ahead=self.decoders.waiting)
        async with while_connected(receive, deadline_s=deadline_s):
            asked = await self.decoders.run(parse)
            record.adopt_client_id(asked.id or "")
            if asked.timeout_s is not None:
                deadline_s = min(deadline_s, record.started_s + asked.timeout_s)
            await self.predictor.check(deadline_s=deadline_s, ahead=self.decoders.waiting + len(asked.rows) - 1)
            with self.bodies.reserve(self._row_bytes(asked.rows), already_held=body_bytes):
                rows = [await self._decoded(row) for row in asked.rows]
        return PreparedRequest(replace(asked, rows=()), rows, deadline_s)

    async def answer(
        self,
        prepared: PreparedRequest,
        record: RequestRecord,
        encode: Callable[[Sequence[Prediction]], T],
        *,
        receive: Receive | None = None,
    ) -> tuple[Sequence[Prediction], T]:
        """Predict all rows, and encode the predictions.

        Raises:
            RequestRejected: at least one sample was rejected, and so the whole request is.
        """
        prepared_s, asked = time.monotonic(), prepared.asked
        async with while_connected(receive, deadline_s=prepared.deadline_s + DEADLINE_GRACE_S):
            predictions = await predict_samples(
                *(self.predictor, prepared.rows, asked.key),
                deadline_s=prepared.deadline_s,
                request_id=record.request_id,
            )
        now = predictions[0].version_number
        if asked.version not in (None, now):
            raise UnknownModelError(f"version {asked.version} was replaced by {now} while the request was in flight")
        record.version = predictions[0].version
        predicted_s = time.monotonic()
        large = sum(prediction.output.nbytes for prediction in predictions) > _LARGE_RESPONSE_BYTES
        encoded = await asyncio.to_thread(encode, predictions) if large else encode(predictions)
        input_s = prepared_s - record.received_s
        record.inference = Inference(predictions, input_s=input_s, output_s=time.monotonic() - predicted_s)
        return predictions, encoded

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
            )
        )
