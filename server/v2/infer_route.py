"""POST …/infer: one or several images in, a row of probabilities or the best classes out for each."""

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

from server.answer_headers import answer_headers
from server.body import BodyReader, shortened
from server.connection import LATE_S, while_connected
from server.decode_pool import DecodePool
from server.errors import InferenceRequestError, UnknownModelError
from server.images import image_tensor
from server.predictor import Answer, Predictor
from server.request_record import RequestRecord
from server.v2.compression import accepted_encoding, content_encoding, pack, unpack
from server.v2.infer_answer import HEADER_LENGTH, InferAnswer, build_answer
from server.v2.infer_request import InferRequest, RequestedAnswer, parse_infer_request
from server.v2.signature import Signature
from server.v2.statistics import Inference
from server.v2.tensors import Image

_LONG_ANSWER_VALUES = 16_384
"""An answer of more numbers takes milliseconds to write down: a thread's work, not the event loop's."""


@dataclass(frozen=True)
class InferRoute:
    """What answers inference requests, with all it needs; shares its limits with POST /predict."""

    predictor: Predictor
    signature: Signature
    bodies: BodyReader
    decoders: DecodePool
    timeout_s: float
    max_image_pixels: int
    exact_images: bool

    async def infer(self, request: Request, timeout_s: float | None, version: int | None = None) -> Response:
        """Answer one request, for a model and version that were found to be ours.

        Args:
            timeout_s: of the request's header.
            version: the number of the one that the client insists on.
        Raises:
            RequestRefused: one answer is missing, so there is none.
        """
        record = RequestRecord.of(request.scope)
        timeout_s = min(self.timeout_s, timeout_s or self.timeout_s)
        with self.predictor.request():
            with shortened(timeout_s, limit_s=self.timeout_s):
                wanted, images, deadline_s = await self._images(request, record.started_s + timeout_s)
            prepared_s = time.monotonic()
            async with while_connected(request.receive, deadline_s=deadline_s + LATE_S):
                answers = await self._of_one_version(images, deadline_s, record.request_id)
        if version is not None and version != answers[0].version_number:
            raise UnknownModelError(
                f"version {version} was replaced by {answers[0].version_number} while the request was under way"
            )
        record.version = answers[0].version
        answered_s = time.monotonic()
        response = await self._response(request, answers, wanted)
        input_s = prepared_s - record.received_s
        record.inference = Inference(answers, input_s=input_s, output_s=time.monotonic() - answered_s)
        return response

    async def _images(self, request: Request, deadline_s: float) -> tuple[RequestedAnswer, list[Tensor], float]:
        """What to answer with, the images as the pipeline takes them, and the deadline. The body is let go of here."""
        record = RequestRecord.of(request.scope)
        encoding = content_encoding(request.headers.get("content-encoding"))
        json_bytes = _json_bytes(request)
        async with self.bodies.read(request, deadline_s=deadline_s, may_be_empty=True) as body:
            record.received_s = time.monotonic()
            await self.predictor.check(deadline_s=deadline_s, ahead=self.decoders.waiting)
            async with while_connected(request.receive, deadline_s=deadline_s):
                asked = await self.decoders.run(partial(self._parse, body, encoding, json_bytes))
                record.take_id(asked.answer.id or "")
                if asked.timeout_s is not None:
                    deadline_s = min(deadline_s, record.started_s + asked.timeout_s)
                await self.predictor.check(deadline_s=deadline_s, ahead=self.decoders.waiting + len(asked.images) - 1)
                with self.bodies.hold(self._image_bytes(asked.images), beside=len(body)):
                    images = [await self._decoded(image) for image in asked.images]
        return asked.answer, images, deadline_s

    def _parse(self, body: bytes, encoding: str | None, json_bytes: int | None) -> InferRequest:
        plain = body if encoding is None else unpack(body, encoding, self.bodies.max_body_bytes)
        return parse_infer_request(plain, json_bytes, self.signature)

    def _image_bytes(self, images: Sequence[Image]) -> int:
        """What the images take until they are all decoded."""
        files = sum(len(image) for image in images if isinstance(image, bytes))
        return files + len(images) * self.signature.image_values

    async def _decoded(self, image: Image) -> Tensor:
        """One at a time for each request: a neighbour's image waits for one image and not for a batch of them."""
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

    async def _of_one_version(self, images: Sequence[Tensor], deadline_s: float, request_id: str) -> list[Answer]:
        """An answer for each image, all of the same version: where it changed meanwhile, those of the former one are asked anew."""
        answers = await self._answers(images, deadline_s, request_id)
        while len({answer.version_number for answer in answers}) > 1:
            number = self.predictor.version.number
            stale = [at for at, answer in enumerate(answers) if answer.version_number != number]
            fresh = await self._answers([images[at] for at in stale], deadline_s, request_id)
            for at, answer in zip(stale, fresh, strict=True):
                answers[at] = answer
        return answers

    async def _answers(self, images: Sequence[Tensor], deadline_s: float, request_id: str) -> list[Answer]:
        """An answer for each image. At the first refusal the others are withdrawn: the request fails as one."""
        tasks: list[asyncio.Task[Answer]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for image in images:
                    predict = self.predictor.predict(image, deadline_s=deadline_s, request_id=request_id)
                    tasks.append(group.create_task(predict))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _response(self, request: Request, answers: Sequence[Answer], wanted: RequestedAnswer) -> Response:
        encoding = accepted_encoding(request.headers.get("accept-encoding"))
        make = partial(_packed_answer, answers, wanted, self.signature, encoding)
        long = len(answers) * self.signature.num_classes > _LONG_ANSWER_VALUES
        answer, body = await asyncio.to_thread(make) if long else make()
        headers = answer_headers(answers) | {"Vary": "Accept-Encoding"}
        if answer.json_bytes is not None:
            headers[HEADER_LENGTH] = str(answer.json_bytes)
        if encoding is not None:
            headers["Content-Encoding"] = encoding
        return Response(body, media_type=answer.media_type, headers=headers)


def _packed_answer(
    answers: Sequence[Answer], wanted: RequestedAnswer, signature: Signature, encoding: str | None
) -> tuple[InferAnswer, bytes]:
    answer = build_answer(answers, wanted, signature)
    return answer, answer.body if encoding is None else pack(answer.body, encoding)


def _json_bytes(request: Request) -> int | None:
    given = request.headers.get(HEADER_LENGTH)
    if given is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", given):
        raise InferenceRequestError(f"{HEADER_LENGTH} is {given[:64]!r}; expected a number of bytes")
    return int(given)
