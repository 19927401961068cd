"""Observes requests over HTTP and gRPC: one record of each request, which the metrics, the traces and the log read at its end."""

from __future__ import annotations

import logging
import time

from starlette.types import Scope

from multiworld_serving.common.observers import suppress_errors
from multiworld_serving.server.observability.request_outcomes import RequestOutcomes
from multiworld_serving.server.observability.request_record import (
    CLIENT_CLOSED_REQUEST,
    InferenceProtocol,
    RequestRecord,
)
from multiworld_serving.server.observability.request_traces import RequestTraces

logger = logging.getLogger(__name__)

MAX_ERRORS_PER_S = 50
"""Lines about errors in one second without `log_all`: an overloaded service rejects thousands of requests per second."""


class RequestObserver:
    """Costs some tens of microseconds for each request.

    Args:
        traces: None = no tracing.
        log_all: log all requests; False logs failed inference requests only, at most `MAX_ERRORS_PER_S`.
    """

    def __init__(
        self, outcomes: RequestOutcomes, traces: RequestTraces | None = None, *, log_all: bool = False
    ) -> None:
        self._outcomes = outcomes
        self._traces = traces
        self._log_all = log_all
        self._log = suppress_errors(self._log_request)
        self._second = 0
        self._errors = 0

    def begin(self, scope: Scope, version: str, protocol: InferenceProtocol | None) -> RequestRecord:
        """Create the record of a request. The caller completes it and calls `end` when the request has ended.

        Args:
            version: that serves now.
            protocol: None = not an inference request, which is logged only.
        """
        record = RequestRecord.begin(scope, version)
        record.protocol = protocol
        if protocol is not None:
            self._outcomes.started()
            if self._traces is not None:
                self._traces.begin(scope, record)
        return record

    def end(self, scope: Scope, record: RequestRecord) -> None:
        """Count, trace and log the request."""
        record.duration_s = time.monotonic() - record.started_s
        if record.protocol is not None:
            if record.status == CLIENT_CLOSED_REQUEST:
                record.reason = "cancelled"
            self._outcomes.ended(record)
            if self._traces is not None:
                self._traces.end(scope, record)
        if self._log_all or (record.protocol is not None and record.status >= 400):
            self._log(scope, record)

    def _log_request(self, scope: Scope, record: RequestRecord) -> None:
        """Its fields are `extra` fields of the log record, so that no client can forge one."""
        if not self._log_all and not self._may_log_error():
            return
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
        logger.log(logging.WARNING if record.status >= 500 else logging.INFO, "request", extra=fields)

    def _may_log_error(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            if (left_out := self._errors - MAX_ERRORS_PER_S) > 0:
                logger.warning("more failed requests than are logged; --access-log logs all left_out=%d", left_out)
            self._second, self._errors = second, 0
        self._errors += 1
        return self._errors <= MAX_ERRORS_PER_S
