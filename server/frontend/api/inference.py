"""The steps of an inference request that all routes and gRPC share: authorize, decode images, predict, and encode large outputs.

Each route receives and parses its body between them: see `PredictRoute.answer`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar
from urllib.parse import quote

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive
from torch import Tensor

from multiworld_serving.common.config.process import release_free_memory
from multiworld_serving.common.daemon_threads import DaemonThreads
from multiworld_serving.common.service.errors import (
    ForbiddenError,
    ImageError,
    ImageTooLargeError,
    RequestRejected,
    StageError,
    UnknownModelError,
)
from multiworld_serving.common.service.predictor import Prediction, ServedModel
from multiworld_serving.models.errors import BundleError
from multiworld_serving.server.frontend.api.images import LargeImageError, QuickJpeg, image_tensor
from multiworld_serving.server.frontend.api.oip.metadata import Signature
from multiworld_serving.server.frontend.api.short_jobs import ShortJobs
from multiworld_serving.server.frontend.http.limits import RequestLimits
from multiworld_serving.server.frontend.http.open_request import OpenRequest, RequestGate
from multiworld_serving.server.frontend.http.route import client_timeout_s
from multiworld_serving.server.frontend.leaders.pool import LeaderPool
from multiworld_serving.server.frontend.observability.request_records import RequestRecord

T = TypeVar("T")

_LARGE_BYTES = 1 << 14
"""Serializing a response with more bytes of outputs takes longer than handing it to a thread does."""


@dataclass(frozen=True)
class OutputOptions:
    """How to return one output.

    Attributes:
        index: of the model's outputs; of a pipeline in Python, `name` says which one.
        classes: return this many of the most probable classes as "value:index:label"; 0 = return the tensor.
        binary: return the data after the JSON instead of in it.
        name: of an output of a pipeline in Python; "" = all of them.
    """

    index: int
    classes: int = 0
    binary: bool = False
    name: str = ""


@dataclass
class InferRequest:
    """A parsed request.

    Attributes:
        rows: at least one: input rows of the model [N, …], or the files of images, not yet decoded.
        key: of the rows; see `RowFormat.key`.
        outputs: at least one, in the order of the response. Only of the Open Inference Protocol.
        id: the client's id, to be returned; None = none.
        timeout_s: the client's timeout since the request's arrival; None = the server's.
        version: number of the version that must answer; None = any.
    """

    rows: Tensor | Sequence[bytes]
    key: str = ""
    outputs: Sequence[OutputOptions] = ()
    id: str | None = None
    timeout_s: float | None = None
    version: int | None = None


class Inference:
    """Computes the inference requests of a frontend.

    Args:
        large_images: decodes the large images of all models, one at a time; None = of this model.

    Attributes:
        threads: parse requests and decode images. They start on demand.
        short_jobs: decodes images that are so small that it takes as long to hand them to a thread.
        large_images: the thread for large images.
        respond: called with the rows of a request, their key, and their prediction. Returns the prediction for the client.
    """

    def __init__(
        self,
        pipeline: LeaderPool,
        model: ServedModel,
        limits: RequestLimits,
        large_images: DaemonThreads | None = None,
    ) -> None:
        row_bytes = 1 if model.pipeline else model.input_rows.max_row_bytes
        fitting = limits.max_body_bytes // max(1, row_bytes)
        self.gate = RequestGate(pipeline, limits)
        self.signature = Signature(model, max(1, min(limits.max_rows, fitting)), limits.finite_inputs)
        self.threads = DaemonThreads(limits.decode_threads, "decode", max_waiting=limits.max_waiting_decodes)
        self.short_jobs = ShortJobs()
        self.large_images = large_images or large_image_thread(limits)
        self.respond: Callable[[Tensor, str, Prediction], Prediction] = lambda _, __, prediction: prediction

    def open(
        self, record: RequestRecord, receive: Receive | None = None, timeout_s: float | None = None
    ) -> OpenRequest:
        """A request for this model; see `OpenRequest`. Raises ForbiddenError unless its key permits the model."""
        model = self.signature.model.name
        if record.key_models is not None and model not in record.key_models:
            raise ForbiddenError(f"this key does not permit inference with the model {model!r}; use another key")
        return OpenRequest(self.gate, record, receive, timeout_s)

    def open_http(self, request: Request) -> OpenRequest:
        """`open` for a request over HTTP. Raises InvalidParameterError for its timeout."""
        return self.open(RequestRecord.of(request.scope), request.receive, client_timeout_s(request))

    async def predict(self, opened: OpenRequest, asked: InferRequest) -> Prediction:
        """Decode the images of a request, and have the leaders compute its rows, which are removed from `asked`.

        Raises:
            RequestRejected: an image is invalid, or at least one sample was rejected, and so the whole request is.
        """
        record = opened.record
        record.adopt_client_id(asked.id or "")
        if asked.timeout_s is not None:
            opened.shorten(asked.timeout_s)
        rows, asked.rows = await self._decoded(opened, asked.rows), ()
        opened.release()
        record.input_s, opened.predicts = time.monotonic() - record.received_s, True
        record.deadline_s, traced = opened.deadline_s, record.span is not None
        try:
            found = await self.gate.pipeline.predict(
                rows, key=asked.key, deadline_s=record.deadline_s, request_id=record.request_id, traced=traced
            )
        except RequestRejected as error:
            record.trace = error.trace
            raise
        record.version, record.prediction, record.predicted_s = found.version, found, time.monotonic()
        record.trace, prediction = found.trace, self.respond(rows, asked.key, found)
        if asked.version not in (None, prediction.version_number):
            raise UnknownModelError(
                f"version {asked.version} was replaced by {prediction.version_number} while the request was in flight"
            )
        return prediction

    async def _decoded(self, opened: OpenRequest, rows: Tensor | Sequence[bytes]) -> Tensor:
        """The rows. A request decodes one image at a time, so that others wait for one image and not for a batch."""
        if isinstance(rows, Tensor):
            return rows
        opened.hold(sum(map(len, rows)) + len(rows) * self.signature.model.input_rows.max_row_bytes)
        images = []
        for number, file in enumerate(rows, 1):
            try:
                images.append(await self._decoded_file(file))
            except (ImageError, ImageTooLargeError) as error:
                if len(rows) == 1:
                    raise
                raise type(error)(f"image {number} of {len(rows)}: {error}") from error
        return torch.stack(images)

    async def _decoded_file(self, file: bytes) -> Tensor:
        try:
            return await self.threads.run(partial(self.decode_image, file))
        except LargeImageError:
            return await self.large_images.run(partial(self._decode_large_image, file))

    def decode_image(self, file: bytes, *, allow_large: bool = False, quick: QuickJpeg | None = None) -> Tensor:
        """The input row of an image file. Runs on a thread, unless it is quick. Raises LargeImageError if another thread must do it."""
        sizes = self.signature.model.image
        assert sizes is not None, "only models of images take files"
        return image_tensor(file, sizes, self.gate.limits.max_image_pixels, allow_large=allow_large, quick=quick)

    def _decode_large_image(self, file: bytes) -> Tensor:
        try:
            return self.decode_image(file, allow_large=True)
        finally:
            release_free_memory()


def large_image_thread(limits: RequestLimits) -> DaemonThreads:
    """The thread for the large images of a process: together, they would need gigabytes, and the other images would wait for them."""
    return DaemonThreads(1, "decode-large", max_waiting=limits.max_waiting_decodes)


async def encoded(prediction: Prediction, encode: Callable[[], T]) -> T:
    """What `encode` returns. Runs it on a thread if the prediction is large."""
    return await asyncio.to_thread(encode) if prediction.output.nbytes > _LARGE_BYTES else encode()


def output_tensors(prediction: Prediction, model: ServedModel) -> tuple[Tensor, ...]:
    """The outputs of the samples, [N, …] each, in the order of the model's.

    Raises:
        StageError: the model returned probabilities that are not finite, or outputs of different lengths.
    """
    try:
        outputs = model.output_rows.unpack(prediction.output)
    except (BundleError, RuntimeError) as error:
        raise StageError(f"the model returned outputs that do not fit its description: {error}") from error
    if model.labels and not outputs[0].isfinite().all().item():
        raise StageError("the model returned probabilities that are not finite for this sample; check the weights")
    return outputs


def prediction_headers(prediction: Prediction) -> dict[str, str]:
    """Version with its digest, path and attempts."""
    return _headers(prediction.version, prediction.version_digest, prediction.path, prediction.attempts)


def _headers(version: str, digest: str, path: tuple[str, ...], attempts: int) -> dict[str, str]:
    return {
        "X-Model-Version": _quoted(version, ":+@,"),
        "X-Model-Digest": digest,
        "X-Path": ",".join(_quoted(world, ":+@") for world in path),
        "X-Attempts": str(attempts),
    }


class JsonResponse(Response):
    """A prediction as JSON, formed without Starlette's general way to headers."""

    def __init__(self, body: bytes, prediction: Prediction) -> None:
        self.status_code, self.background, self.body = 200, None, body
        of_prediction = _raw_headers(
            prediction.version, prediction.version_digest, prediction.path, prediction.attempts
        )
        self.raw_headers = [*of_prediction, (b"content-length", b"%d" % len(body))]


@lru_cache(1024)
def _raw_headers(version: str, digest: str, path: tuple[str, ...], attempts: int) -> list[tuple[bytes, bytes]]:
    found = {"Content-Type": "application/json", **_headers(version, digest, path, attempts)}
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in found.items()]


@lru_cache(1024)
def _quoted(name: str, safe: str) -> str:
    """Percent-encoded: a version may be a file name, and header values are limited to ASCII."""
    return quote(name, safe=safe)
