"""POST /predict of a pipeline in Python: any body in, and what the last stage returns out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jsonschema
import msgspec
from starlette import requests
from starlette.responses import Response
from torch import Tensor

from multiworld_serving.common.service.errors import InvalidInputError, StageError
from multiworld_serving.common.service.predictor import Prediction
from multiworld_serving.models.stages import api
from multiworld_serving.models.stages.objects import OBJECT_ROWS, ObjectError, encode, rows_of
from multiworld_serving.models.stages.pipeline import PipelineDescription
from multiworld_serving.models.stages.responses import response_of
from multiworld_serving.server.frontend.api.inference import Inference, InferRequest, encoded, prediction_headers
from multiworld_serving.server.frontend.http.open_request import OpenRequest

_HIDDEN_HEADERS = frozenset(
    ("authorization", "connection", "content-length", "cookie", "host", "proxy-authorization", "transfer-encoding")
)
_LARGE_BODY_BYTES = 1 << 18
_FORBIDDEN_HEADERS = frozenset(("content-length", "transfer-encoding", "connection"))


@dataclass(frozen=True)
class ObjectRoute:
    """The route POST /predict of a pipeline in Python, and its dependencies."""

    inference: Inference
    pipeline: PipelineDescription

    def __post_init__(self) -> None:
        schema = self.pipeline.request_schema
        validator = None if schema is None else jsonschema.Draft202012Validator(schema)
        object.__setattr__(self, "_validator", validator)

    async def answer(self, request: requests.Request) -> Response:
        """Send the body to the first stage."""
        async with self.inference.open_http(request) as opened:
            _, prediction = await self._predicted(opened, request)
            return await encoded(prediction, partial(_response, prediction))

    async def _predicted(self, opened: OpenRequest, request: requests.Request) -> tuple[Tensor, Prediction]:
        """Receive a request and compute it. Returns its row, too."""
        inference, body = self.inference, await opened.body(request, allow_empty=True)
        await opened.admit()
        make = partial(self._rows, body, request)
        rows = await inference.threads.run(make) if len(body) > _LARGE_BODY_BYTES else make()
        del body, make
        return rows, await inference.predict(opened, InferRequest(rows, OBJECT_ROWS.key(rows)))

    def _object(self, row: api.Request) -> Any:
        """What travels to the first stage."""
        return row

    def _rows(self, body: bytes, request: requests.Request) -> Tensor:
        """The row of a request. Raises InvalidInputError if its JSON is not what the first stage takes."""
        validator: Any = self.__dict__["_validator"]
        if validator is not None:
            try:
                given = msgspec.json.decode(body)
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                raise InvalidInputError(f"the body is not valid JSON: {error}") from error
            if (wrong := jsonschema.exceptions.best_match(validator.iter_errors(given))) is not None:
                raise InvalidInputError(f"the body does not fit at {wrong.json_path}: {wrong.message[:300]}")
        headers = {name: value for name, value in request.headers.items() if name not in _HIDDEN_HEADERS}
        row = api.Request(body, request.headers.get("content-type", ""), dict(request.query_params), headers)
        return object_rows([self._object(row)])


def object_rows(objects: list[Any]) -> Tensor:
    """The rows of these objects. Raises InvalidInputError if they are too large."""
    try:
        return rows_of([encode(each) for each in objects])
    except ObjectError as error:
        raise InvalidInputError(str(error)) from error


def objects_of(prediction: Prediction) -> list[Any]:
    """Decode the result of each sample. Raises InvalidInputError if the pipeline refused a sample, and StageError for invalid bytes."""
    try:
        found = OBJECT_ROWS.decoded(prediction.output)
    except ObjectError as error:
        raise StageError(f"the last stage returned something that is not an object: {error}") from error
    for number, each in enumerate(found, 1):
        if isinstance(each, api.InvalidInput):
            raise InvalidInputError(str(each) if len(found) == 1 else f"sample {number} of {len(found)}: {each}")
    return found


def _response(prediction: Prediction) -> Response:
    (result,) = objects_of(prediction)
    return http_response(result, prediction_headers(prediction))


def http_response(result: Any, headers: dict[str, str]) -> Response:
    """The response of a result of the last stage, with its own headers and these. Raises StageError if it is not valid."""
    try:
        result = response_of(result)
    except ObjectError as error:
        raise StageError(f"the last stage returned {error}") from error
    own = {name: value for name, value in result.headers.items() if name.lower() not in _FORBIDDEN_HEADERS}
    if not 200 <= result.status <= 599 or not all(map(_is_printable, (result.content_type, *own, *own.values()))):
        raise StageError(f"the last stage returned a response with the status {result.status} and invalid headers")
    return Response(result.body, result.status, headers | own, media_type=result.content_type)


def _is_printable(text: str) -> bool:
    return text.isascii() and text.isprintable()
