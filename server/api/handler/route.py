"""POST /predict with a handler: any body in, any body out."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from fastapi import APIRouter
from fastapi.responses import Response
from starlette.requests import Request
from torch import Tensor

from multiworld_serving.models.bundle.nodes import DTYPES
from multiworld_serving.models.errors import BundleError
from multiworld_serving.server.api.handler import program
from multiworld_serving.server.api.handler.processes import HandlerProcesses
from multiworld_serving.server.api.oip.infer_response import output_tensors
from multiworld_serving.server.api.predict import Seconds, timeout_parameter
from multiworld_serving.server.api.response_headers import HEADER_DOCUMENTATION, prediction_headers
from multiworld_serving.server.api.samples import predict_samples
from multiworld_serving.server.errors import HandlerError, HandlerInputError
from multiworld_serving.server.http.body import BodyReader, translate_body_timeout
from multiworld_serving.server.http.disconnect import DEADLINE_GRACE_S, while_connected
from multiworld_serving.server.http.errors import error_documentation
from multiworld_serving.server.http.inference_route import InferenceRoute
from multiworld_serving.server.observability.request_record import Inference, RequestRecord
from multiworld_serving.server.predictor import Prediction, Predictor, ServedModel

logger = logging.getLogger(__name__)

_FAILED = "the handler failed on this request; search the log for the request id"


@dataclass(frozen=True)
class HandlerRoute:
    """The route POST /predict of a service with a handler, and its dependencies."""

    summary: ClassVar[str] = "any body that the handler decodes"
    predictor: Predictor
    model: ServedModel
    handler: HandlerProcesses
    bodies: BodyReader
    timeout_s: float
    max_rows: int

    def router(self) -> APIRouter:
        """The route, documented for OpenAPI."""
        router = APIRouter(tags=["inference"], route_class=InferenceRoute)
        timeout_header = timeout_parameter(self.timeout_s)

        @router.post(
            "/predict",
            response_class=Response,
            responses={
                200: {"description": "What the handler returns.", "headers": HEADER_DOCUMENTATION},
                **error_documentation((400, 408, 413, 429, 500, 503, 504)),
            },
            openapi_extra={"requestBody": {"required": True, "content": {"*/*": {}}}},
        )
        async def predict(request: Request, timeout_s: Seconds = timeout_header) -> Response:
            """Send the body that the handler of this service expects."""
            return await self._predict(request, min(self.timeout_s, timeout_s or self.timeout_s))

        return router

    async def _predict(self, request: Request, timeout_s: float) -> Response:
        record = RequestRecord.of(request.scope)
        deadline_s = record.started_s + timeout_s
        try:
            with self.predictor.request():
                with translate_body_timeout(timeout_s, limit_s=self.timeout_s):
                    rows, key, input_s = await self._decode(request, deadline_s)
                async with while_connected(request.receive, deadline_s=deadline_s + DEADLINE_GRACE_S):
                    predictions = await predict_samples(
                        self.predictor, rows, key, deadline_s=deadline_s, request_id=record.request_id
                    )
                    predicted_s = time.monotonic()
                    body, content_type = await self._encode(predictions)
        except HandlerError as error:
            logger.error("request_id=%s %s", record.request_id, error)  # noqa: TRY400 - the traceback is the handler's
            raise HandlerError(_FAILED) from error
        record.version = predictions[0].version
        record.inference = Inference(predictions, input_s=input_s, output_s=time.monotonic() - predicted_s)
        return Response(body, media_type=content_type, headers=prediction_headers(predictions))

    async def _decode(self, request: Request, deadline_s: float) -> tuple[Sequence[Tensor], str, float]:
        """Read the body and let the handler decode it; returns input rows, their key and the seconds this took."""
        content_type = request.headers.get("content-type", "")
        async with self.bodies.read(request, deadline_s=deadline_s) as body:
            received_s = time.monotonic()
            await self.predictor.check(deadline_s=deadline_s, ahead=self.handler.waiting)
            async with while_connected(request.receive, deadline_s=deadline_s):
                arrays = await self.handler.call(program.decode, body, content_type)
        rows, key = self._rows(arrays)
        return rows, key, time.monotonic() - received_s

    def _rows(self, arrays: dict[str, np.ndarray[Any, Any]]) -> tuple[Sequence[Tensor], str]:
        names = [spec.name for spec in self.model.inputs]
        if arrays.keys() != set(names):
            raise HandlerError(f"decode returned the inputs {sorted(arrays)}; the model takes {names}")
        tensors = []
        for spec in self.model.inputs:
            tensor = torch.from_numpy(arrays[spec.name])
            if spec.dtype == "bfloat16" and tensor.dtype == torch.float32:  # numpy has no bfloat16
                tensor = tensor.bfloat16()
            if tensor.dtype != DTYPES[spec.dtype] or tensor.dim() != len(spec.shape):
                raise HandlerError(
                    f"decode returned {spec.name!r} as {tensor.dtype} {list(tensor.shape)}; the model takes {spec.dtype} "
                    f"{list(spec.shape)}"
                )
            tensors.append(tensor)
        if not 1 <= len(tensors[0]) <= self.max_rows:
            raise HandlerInputError(f"the request has {len(tensors[0])} samples; expected 1 to {self.max_rows}")
        try:
            rows = self.model.input_rows.pack(tensors)
            return rows.unbind(), self.model.input_rows.key(rows)
        except BundleError as error:
            raise HandlerInputError(f"the model does not take this input: {error}") from error

    async def _encode(self, predictions: Sequence[Prediction]) -> tuple[bytes, str]:
        tensors = output_tensors(predictions, self.model)
        arrays = {spec.name: _array(tensor) for spec, tensor in zip(self.model.outputs, tensors, strict=True)}
        body, content_type = await self.handler.call(program.encode, arrays)
        if not content_type.isascii() or not content_type.isprintable():
            raise HandlerError(f"encode returned the content type {content_type!r:.60}; expected printable ASCII")
        return body, content_type


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return found
