"""What is noted about a request on its way through the frontend."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field

from starlette.types import Scope

_GIVEN_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SCOPE_KEY = "multiworld.request"


@dataclass
class RequestRecord:
    """One for each HTTP request, made by `RequestTracker` and filled in by whoever knows."""

    request_id: str
    version: str
    """Of the model that answered; until one has, of the model that is served."""
    started_s: float = field(default_factory=time.monotonic)
    reason: str = "ok"
    """How it ended: "ok", or the reason why not."""

    @classmethod
    def begin(cls, scope: Scope, version: str) -> RequestRecord:
        """Start the record of this request. Its id is the client's, when that is short and printable, else a new one."""
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given.decode("ascii") if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        record = scope[_SCOPE_KEY] = cls(request_id, version)
        return record

    @classmethod
    def of(cls, scope: Scope) -> RequestRecord:
        """The record that was begun for this request."""
        record = scope[_SCOPE_KEY]
        assert isinstance(record, cls)
        return record
