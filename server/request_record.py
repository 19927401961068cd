"""What is noted about a request on its way through the frontend."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field

from starlette.types import Scope

from server.v2.statistics import Inference

_GIVEN_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SCOPE_KEY = "multiworld.request"


@dataclass
class RequestRecord:
    """One for each HTTP request, made by `RequestTracker` and filled in by whoever knows."""

    request_id: str
    version: str
    """Of the model that answered; until one has, of the model that is served."""
    started_s: float = field(default_factory=time.monotonic)
    received_s: float = 0.0
    """When its body was complete."""
    reason: str = "ok"
    """How it ended: "ok", or the reason why not."""
    inference: Inference | None = None
    """What its answer took, once it has one."""
    status: int = 0
    """Of the answer, once it has begun."""
    id_is_ours: bool = False
    """The client has given none in its headers."""

    @classmethod
    def begin(cls, scope: Scope, version: str) -> RequestRecord:
        """Start the record of this request. Its id is the client's, when that is short and printable, else a new one."""
        record = scope[_SCOPE_KEY] = cls(uuid.uuid4().hex, version, id_is_ours=True)
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        record.take_id(given.decode("latin-1"))
        return record

    def take_id(self, given: str) -> None:
        """The client's own id, found in its body: taken when it is short and printable and its headers had none."""
        if self.id_is_ours and _GIVEN_ID.fullmatch(given):
            self.request_id, self.id_is_ours = given, False

    @classmethod
    def of(cls, scope: Scope) -> RequestRecord:
        """The record that was begun for this request."""
        record = scope[_SCOPE_KEY]
        assert isinstance(record, cls)
        return record
