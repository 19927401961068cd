"""The steps of an inference request that HTTP and gRPC share: check, parse, decode, predict, encode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from torch import Tensor

from multiworld_serving.server.api.images import image_tensor
from multiworld_serving.server.api.oip.image_input import Image
from multiworld_serving.server.api.oip.infer_request import InferRequest
from multiworld_serving.server.api.oip.metadata import Signature
from multiworld_serving.server.api.samples import predict_samples
from multiworld_serving.server.daemon_threads import DaemonThreads
from multiworld_serving.server.errors import UnknownModelError
from multiworld_serving.server.http.open_request import OpenRequest, RequestGate
from multiworld_serving.server.observability.request_record import Inference, RequestRecord
from multiworld_serving.server.predictor import Prediction

T = TypeVar("T")

_LARGE_RESPONSE_BYTES = 1 << 16
"""Serializing a response with more bytes of outputs takes milliseconds, so it runs on a thread and not on the event loop."""


@dataclass(frozen=True)
class OipInference:
    """Computes inference requests of the protocol. Shares its limits and threads with POST /predict."""

    gate: RequestGate
    signature: Signature
    threads: DaemonThreads

    async def answer(
        self,
        opened: OpenRequest,
        record: RequestRecord,
        parse: Callable[[], InferRequest],
        encode: Callable[[Sequence[Prediction], InferRequest], T],
    ) -> tuple[Sequence[Prediction], T]:
        """Answer a request whose body was received.

        Args:
            parse: parses the body, on a thread. The body is freed before the prediction.
            encode: serializes the predictions for the request, which is given without its rows.
        Returns:
            The predictions, and what `encode` made of them.
        Raises:
            RequestRejected: the request is invalid, or at least one sample was rejected, and so the whole request is.
        """
        predictor, threads = self.gate.predictor, self.threads
        await predictor.check(deadline_s=opened.deadline_s, ahead=threads.waiting)
        asked = await threads.run(parse)
        del parse
        record.adopt_client_id(asked.id or "")
        if asked.timeout_s is not None:
            opened.shorten(asked.timeout_s)
        await predictor.check(deadline_s=opened.deadline_s, ahead=threads.waiting + len(asked.rows) - 1)
        opened.hold(self._row_bytes(asked.rows))
        rows = [await self._decoded(row) for row in asked.rows]
        asked = replace(asked, rows=())
        opened.release()
        prepared_s, opened.predicts = time.monotonic(), True
        predictions = await predict_samples(
            predictor, rows, asked.key, deadline_s=opened.deadline_s, request_id=record.request_id
        )
        now = predictions[0].version_number
        if asked.version not in (None, now):
            raise UnknownModelError(f"version {asked.version} was replaced by {now} while the request was in flight")
        record.version = predictions[0].version
        predicted_s = time.monotonic()
        large = sum(prediction.output.nbytes for prediction in predictions) > _LARGE_RESPONSE_BYTES
        encoded = await asyncio.to_thread(encode, predictions, asked) if large else encode(predictions, asked)
        times_s = prepared_s - record.received_s, time.monotonic() - predicted_s
        record.inference = Inference(predictions, *times_s)
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
        return await self.threads.run(
            partial(
                image_tensor,
                image,
                resize_size=sizes.resize_size,
                crop_size=sizes.crop_size,
                max_pixels=self.gate.limits.max_image_pixels,
            )
        )
