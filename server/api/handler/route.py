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
from multiworld_serving.server.api.response_headers import HEADER_DOCUMENTATION, prediction_headers
from multiworld_serving.server.api.samples import predict_samples
from multiworld_serving.server.errors import HandlerError, HandlerInputError
from multiworld_serving.server.http.errors import error_documentation
from multiworld_serving.server.http.inference_route import Seconds, inference_router, timeout_parameter
from multiworld_serving.server.http.open_request import OpenRequest, RequestGate
from multiworld_serving.server.observability.request_record import Inference, RequestRecord
from multiworld_serving.server.predictor import Prediction, ServedModel

logger = logging.getLogger(__name__)

_FAILED = "the handler failed on this request; search the log for the request id"


@dataclass(frozen=True)
class HandlerRoute:
    """The route POST /predict of a service with a handler, and its dependencies."""

    summary: ClassVar[str] = "any body that the handler decodes"
    gate: RequestGate
    model: ServedModel
    handler: HandlerProcesses
    max_rows: int

    def router(self) -> APIRouter:
        """The route, documented for OpenAPI."""
        router = inference_router("inference")
        timeout_header = timeout_parameter(self.gate.limits.timeout_s)

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
            record = RequestRecord.of(request.scope)
            try:
                return await self._predict(request, record, timeout_s)
            except HandlerError as error:
                logger.error("request_id=%s %s", record.request_id, error)  # noqa: TRY400 - the traceback is the handler's
                raise HandlerError(_FAILED) from error

        return router

    async def _predict(self, request: Request, record: RequestRecord, timeout_s: float | None) -> Response:
        predictor = self.gate.predictor
        async with OpenRequest(self.gate, record, request.receive, timeout_s) as opened:
            body = await opened.body(request.headers)
            await predictor.check(deadline_s=opened.deadline_s, ahead=self.handler.waiting)
            arrays = await self.handler.call(program.decode, body, request.headers.get("content-type", ""))
            opened.release()
            del body
            rows, key = self._rows(arrays)
            decoded_s, opened.predicts = time.monotonic(), True
            predictions = await predict_samples(
                predictor, rows, key, deadline_s=opened.deadline_s, request_id=record.request_id
            )
            predicted_s = time.monotonic()
            response, content_type = await self._encode(predictions)
        record.version = predictions[0].version
        times_s = decoded_s - record.received_s, time.monotonic() - predicted_s
        record.inference = Inference(predictions, *times_s)
        return Response(response, media_type=content_type, headers=prediction_headers(predictions))

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
