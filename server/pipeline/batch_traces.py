"""The trace spans of requests inside the pipeline:

    POST /predict                     the request (server/observability/tracing.py)
      stage 0                         one attempt: from when its batch could have been sent until the worker returned it
        queue                         waiting in the leader
        transfer                      on the link and at the worker
          compute                     at the worker; the leader takes its duration from the result
      stage 1 …

A batch may contain requests of several traces. Each trace gets its own spans for the batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from multiworld_serving.common.observers import observer
from multiworld_serving.server.replicas.worker import LinkId, Worker
from multiworld_serving.server.scheduling.actions import SendBatch


@observer
class BatchTraces:
    """Creates the spans of each attempt when it ends. A batch without traced requests has none."""

    def __init__(self, tracer: Any) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        self._tracer = tracer
        self._inside = set_span_in_context
        self._client = SpanKind.CLIENT
        self._status, self._error = Status, StatusCode.ERROR
        self._attempts: dict[tuple[int, LinkId], tuple[SendBatch, str, int, set[Any]]] = {}
        """The attempts in flight, by batch and link: the action, the version, the time in ns, and the spans of the requests."""

    def sent(self, action: SendBatch, worker: Worker, version: str, requests: set[Any]) -> None:
        """A batch is sent.

        Args:
            version: the name of the version.
            requests: the spans of its traced requests.
        """
        if requests:
            self._attempts[action.batch, worker.id] = action, version, time.time_ns(), requests

    def answered(self, batch: int, worker: Worker, compute_s: float, waited_s: float, transfer_s: float) -> None:
        """A worker has returned a batch. Half of the transfer counts as the way back."""
        computed_ns = time.time_ns() - round(transfer_s / 2 * 1e9)
        for stage, transfer in self._begin_attempt(batch, worker):
            times = {"compute_s": compute_s, "waited_s": waited_s, "transfer_s": transfer_s}
            transfer.set_attributes({f"multiworld.{name}": seconds for name, seconds in times.items()})
            facts = {"multiworld.worker": worker.name}
            self._begin("compute", transfer, computed_ns - round(compute_s * 1e9), facts).end(computed_ns)
            transfer.end()
            stage.end()

    def failed(self, batch: int, worker: Worker, why: str) -> None:
        """An attempt failed."""
        for stage, transfer in self._begin_attempt(batch, worker):
            transfer.set_status(self._status(self._error, why))
            transfer.end()
            stage.end()

    def link_ended(self, worker: Worker) -> None:
        """The attempts in flight on this link failed."""
        for batch, _ in [key for key in self._attempts if key[1] == worker.id]:
            self.failed(batch, worker, f"the link broke: {worker.ending and worker.ending.cause}")

    def _begin_attempt(self, batch: int, worker: Worker) -> Iterator[tuple[Any, Any]]:
        """The spans of the stage and of the transfer of an attempt in flight, which has ended, for each traced request."""
        if (found := self._attempts.pop((batch, worker.id), None)) is None:
            return
        action, version, sent_ns, requests = found
        since_ns = sent_ns - round(action.waited_s * 1e9)
        facts = {"multiworld.stage": action.stage, "multiworld.batch": batch}
        for request in requests:
            stage = self._begin(f"stage {action.stage}", request, since_ns, facts)
            if action.kind != "hedge":
                self._begin("queue", stage, since_ns, {}).end(sent_ns)
            attributes = _attributes(action, worker, version)
            yield stage, self._begin("transfer", stage, sent_ns, attributes, kind=self._client)

    def _begin(self, name: str, parent: Any, start_ns: int, attributes: Mapping[str, str | int], **kind: Any) -> Any:
        context = self._inside(parent)
        return self._tracer.start_span(name, context=context, start_time=start_ns, attributes=attributes, **kind)


def _attributes(action: SendBatch, worker: Worker, version: str) -> dict[str, str | int]:
    return {
        "multiworld.world": worker.id.world,
        "multiworld.generation": worker.generation,
        "multiworld.worker": worker.name,
        "multiworld.version": version,
        "multiworld.images": len(action.requests),
        "multiworld.kind": action.kind,
        "multiworld.attempt": action.attempt,
    }
