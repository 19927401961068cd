"""POST /predict with a handler: any body in, any body out."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from multiworld_serving.common.service.errors import HandlerError, HandlerInputError
from multiworld_serving.common.service.predictor import Prediction
from multiworld_serving.models.bundle.nodes import DTYPES
from multiworld_serving.models.errors import BundleError
from multiworld_serving.server.frontend.api.handler import program
from multiworld_serving.server.frontend.api.handler.handler_processes import HandlerProcesses
from multiworld_serving.server.frontend.api.inference import (
    Inference,
    InferRequest,
    output_tensors,
    prediction_headers,
)
from multiworld_serving.server.frontend.http.route import query_parameters

logger = logging.getLogger(__name__)

_FAILED = "the handler failed on this request; search the log for the request id"


@dataclass(frozen=True)
class HandlerRoute:
    """The route POST /predict of a service with a handler, and its dependencies."""

    inference: Inference
    handler: HandlerProcesses

    async def answer(self, request: Request) -> Response:
        """Send the body to the handler, and its inputs to the model."""
        query_parameters(request)
        inference, handler = self.inference, self.handler
        opened = inference.open_http(request)
        try:
            async with opened:
                body = await opened.body(request.headers)
                await opened.admit()
                arrays = await handler.call(program.decode, body, request.headers.get("content-type", ""))
                del body
                asked = await inference.threads.run(partial(self._request, arrays))
                del arrays
                return await self._response(await inference.predict(opened, asked))
        except HandlerError as error:
            logger.error("request_id=%s %s", opened.record.request_id, error)  # noqa: TRY400 - the traceback is the handler's
            raise HandlerError(_FAILED) from error

    def _request(self, arrays: dict[str, np.ndarray[Any, Any]]) -> InferRequest:
        model, max_rows = self.inference.signature.model, self.inference.signature.max_rows
        names = [spec.name for spec in model.inputs]
        if arrays.keys() != set(names):
            raise HandlerError(f"decode returned the inputs {sorted(arrays)}; the model takes {names}")
        tensors = []
        for spec in model.inputs:
            tensor = torch.from_numpy(arrays[spec.name])
            if spec.dtype == "bfloat16" and tensor.dtype == torch.float32:  # numpy has no bfloat16
                tensor = tensor.bfloat16()
            if tensor.dtype != DTYPES[spec.dtype] or tensor.dim() != len(spec.shape):
                raise HandlerError(
                    f"decode returned {spec.name!r} as {tensor.dtype} {list(tensor.shape)}; the model takes {spec.dtype} "
                    f"{list(spec.shape)}"
                )
            tensors.append(tensor)
        if not 1 <= len(tensors[0]) <= max_rows:
            raise HandlerInputError(f"the request has {len(tensors[0])} samples; expected 1 to {max_rows}")
        try:
            rows = model.input_rows.pack(tensors)
            return InferRequest(rows, model.input_rows.key(rows))
        except BundleError as error:
            raise HandlerInputError(f"the model does not take this input: {error}") from error

    async def _response(self, prediction: Prediction) -> Response:
        model = self.inference.signature.model
        tensors = zip(model.outputs, output_tensors(prediction, model), strict=True)
        body, content_type = await self.handler.call(
            program.encode, {spec.name: _array(each) for spec, each in tensors}
        )
        if not content_type.isascii() or not content_type.isprintable():
            raise HandlerError(f"encode returned the content type {content_type!r:.60}; expected printable ASCII")
        return Response(body, media_type=content_type, headers=prediction_headers(prediction))


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return found
