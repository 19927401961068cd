"""The lines about requests: one for each request with `--access-log`, otherwise one for each inference request that failed."""

from __future__ import annotations

import logging
import time

from starlette.types import Scope

from multiworld_serving.server.observability.request_record import RequestRecord

logger = logging.getLogger(__name__)

MAX_ERRORS_PER_S = 50
"""Lines about errors in one second without `--access-log`: an overloaded service rejects thousands of requests per second."""


class AccessLog:
    """Logs requests at their end. Its fields are `extra` fields of the log record, so that no client can forge one.

    Args:
        every_request: log all requests; False logs failed inference requests only, at most `MAX_ERRORS_PER_S`.
    """

    def __init__(self, *, every_request: bool = False) -> None:
        self._every_request = every_request
        self._second = 0
        self._errors = 0

    def request_ended(self, scope: Scope, record: RequestRecord) -> None:
        """Log this request if it is to be logged."""
        if self._every_request or (record.protocol and record.status >= 400 and self._may_log_error()):
            level = logging.WARNING if record.status >= 500 else logging.INFO
            logger.log(level, "request", extra=_fields(scope, record))

    def _may_log_error(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            if (left_out := self._errors - MAX_ERRORS_PER_S) > 0:
                logger.warning("more failed requests than are logged; --access-log logs all left_out=%d", left_out)
            self._second, self._errors = second, 0
        self._errors += 1
        return self._errors <= MAX_ERRORS_PER_S


def _fields(scope: Scope, record: RequestRecord) -> dict[str, object]:
    fields: dict[str, object] = {
        "request_id": record.request_id,
        "method": scope["method"],
        "target": scope["path"][:256],
        "status": record.status,
        "reason": record.reason,
        "ms": round(record.duration_s * 1e3, 3),
        "version": record.version,
    }
    if record.inference is not None:
        fields |= {"path": ",".join(record.path), "attempts": record.attempts}
    if record.key_name:
        fields["key"] = record.key_name
    return fields
