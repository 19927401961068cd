"""What is recorded about one HTTP request."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.types import Scope

from multiworld_serving.server.predictor import Prediction

InferenceProtocol = Literal["predict", "v2", "grpc"]
"""The inference API of a request."""

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected. Never sent; a label of the metrics."""

_GIVEN_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SCOPE_KEY = "multiworld.request"


@dataclass(frozen=True)
class Inference:
    """What was measured for one request.

    Attributes:
        predictions: predictions, one per image, at least one.
        input_s: seconds to parse and decode the images.
        output_s: seconds to serialize the response.
    """

    predictions: Sequence[Prediction]
    input_s: float
    output_s: float


@dataclass
class RequestRecord:
    """The record of one request: the routes complete it, and log, metrics, statistics and traces read it."""

    request_id: str
    version: str
    """Version of the model that answered; before that, the version that serves."""
    started_s: float = field(default_factory=time.monotonic)
    received_s: float = 0.0
    """When the body was complete, by `time.monotonic()`."""
    reason: str = "ok"
    """Outcome: "ok", or the reason of the error."""
    inference: Inference | None = None
    """Measurements of the inference; None = no prediction."""
    status: int = CLIENT_CLOSED_REQUEST
    """Status of the response. The initial value remains if the task of the request is cancelled."""
    protocol: InferenceProtocol | None = None
    """None = it is not an inference request."""
    duration_s: float = 0.0
    """From the first byte of the request to the last byte of the response; 0 = not ended."""
    key_name: str = ""
    """Name of the key with which the request was authorized; empty if it needed none."""
    id_is_generated: bool = False
    """Whether the id was generated, since the headers contain none."""
    span: Any = None
    """The recorded span of a traced request."""

    @classmethod
    def begin(cls, scope: Scope, version: str) -> RequestRecord:
        """Create the record of this request. Its id is the client's if that is short and printable, else a new one."""
        record = scope[_SCOPE_KEY] = cls(f"{random.getrandbits(128):032x}", version, id_is_generated=True)
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        record.adopt_client_id(given.decode("latin-1"))
        return record

    @property
    def attempts(self) -> int:
        """Most attempts of any image of this request; 0 = no prediction."""
        return max((each.attempts for each in self.inference.predictions), default=0) if self.inference else 0

    @property
    def path(self) -> tuple[str, ...]:
        """The workers that computed the first image, by stage."""
        return self.inference.predictions[0].path if self.inference else ()

    def adopt_client_id(self, given: str) -> None:
        """Use the id in the request's body if it is short and printable and the headers contain none."""
        if self.id_is_generated and _GIVEN_ID.fullmatch(given):
            self.request_id, self.id_is_generated = given, False

    @classmethod
    def of(cls, scope: Scope) -> RequestRecord:
        """The record of this request."""
        record = scope[_SCOPE_KEY]
        assert isinstance(record, cls)
        return record
