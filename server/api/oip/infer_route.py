"""POST …/infer: computes one or more samples; returns the outputs, or the most probable classes of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fastapi.responses import Response
from starlette.requests import Request

from multiworld_serving.server.api.oip.compression import accepted_encoding, content_encoding, pack, unpack
from multiworld_serving.server.api.oip.infer_request import InferRequest, parse_infer_request
from multiworld_serving.server.api.oip.infer_response import HEADER_LENGTH, EncodedResponse, build_response
from multiworld_serving.server.api.oip.inference import OipInference, PreparedRequest
from multiworld_serving.server.api.oip.metadata import Signature
from multiworld_serving.server.api.response_headers import prediction_headers
from multiworld_serving.server.errors import InferenceRequestError
from multiworld_serving.server.http.body import translate_body_timeout
from multiworld_serving.server.observability.request_record import RequestRecord
from multiworld_serving.server.predictor import Prediction


@dataclass(frozen=True)
class InferRoute:
    """The inference route."""

    inference: OipInference

    async def infer(self, request: Request, timeout_s: float | None, version: int | None = None) -> Response:
        """Handle a request whose model and version were checked.

        Args:
            timeout_s: the client's timeout from the request header.
            version: number of the version that the client requires; None = any.
        Raises:
            RequestRejected: at least one sample was rejected, and so the whole request is.
        """
        inference, record = self.inference, RequestRecord.of(request.scope)
        timeout_s = min(inference.timeout_s, timeout_s or inference.timeout_s)
        with inference.predictor.request():
            with translate_body_timeout(timeout_s, limit_s=inference.timeout_s):
                prepared = await self._prepared(request, record, record.started_s + timeout_s, version)
            encoding = accepted_encoding(request.headers.get("accept-encoding"))
            encode = partial(_encode_response, asked=prepared.asked, signature=inference.signature, encoding=encoding)
            predictions, (encoded, body) = await inference.answer(prepared, record, encode, receive=request.receive)
        headers = prediction_headers(predictions) | {"Vary": "Accept-Encoding"}
        if encoded.json_bytes is not None:
            headers[HEADER_LENGTH] = str(encoded.json_bytes)
        if encoding is not None:
            headers["Content-Encoding"] = encoding
        return Response(body, media_type=encoded.media_type, headers=headers)

    async def _prepared(
        self, request: Request, record: RequestRecord, deadline_s: float, version: int | None
    ) -> PreparedRequest:
        """Read and decode the body. Frees it before the prediction."""
        encoding = content_encoding(request.headers.get("content-encoding"))
        json_bytes = _json_bytes(request)
        async with self.inference.bodies.read(request, deadline_s=deadline_s, allow_empty=True) as body:
            parse = partial(self._parse, body, encoding, json_bytes, version)
            return await self.inference.prepare(
                *(parse, len(body), record), deadline_s=deadline_s, receive=request.receive
            )

    def _parse(self, body: bytes, encoding: str | None, json_bytes: int | None, version: int | None) -> InferRequest:
        plain = body if encoding is None else unpack(body, encoding, self.inference.bodies.max_body_bytes)
        return replace(parse_infer_request(plain, json_bytes, self.inference.signature), version=version)


def _encode_response(
    predictions: Sequence[Prediction], *, asked: InferRequest, signature: Signature, encoding: str | None
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
