"""The trace spans of requests inside the pipeline:

    POST /predict                     the request (server/observability/tracing.py)
      stage 0                         from when its batch could have been sent to this stage until the stage returned it
        queue                         waiting in the leader
        transfer                      on the link and at the worker; one span per attempt
          compute                     at the worker; the leader takes its duration from the result
      stage 1 …

A batch may contain requests of several traces. Each trace gets its own spans for the batch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from multiworld_serving.common.observers import observer
from multiworld_serving.server.replicas.worker import LinkId, Worker
from multiworld_serving.server.scheduling.actions import SendBatch


@observer
class BatchTraces:
    """Creates the spans of batches that contain traced requests. Other batches cost one dictionary lookup."""

    def __init__(self, tracer: Any) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        self._tracer = tracer
        self._inside = set_span_in_context
        self._client = SpanKind.CLIENT
        self._status, self._error = Status, StatusCode.ERROR
        self._requests: dict[int, Any] = {}
        """The request span of each row of an open traced request."""
        self._stages: dict[int, list[Any]] = {}
        """The stage spans of each batch's current stage, one per traced request."""
        self._transfers: defaultdict[tuple[int, LinkId], list[Any]] = defaultdict(list)
        """The transfer spans of each attempt in flight, by batch and link."""

    def request_started(self, request: int, span: Any) -> None:
        """A request enters the pipeline. Its span is None if it is not traced."""
        if span is not None:
            self._requests[request] = span

    def request_ended(self, request: int) -> None:
        """The request has its outcome."""
        self._requests.pop(request, None)

    def sent(self, action: SendBatch, worker: Worker, version: str) -> None:
        """A batch is sent.

        Args:
            version: the name of the version.
        """
        found = (self._requests[request] for request in action.requests if request in self._requests)
        requests = list(dict.fromkeys(found))  # a request may have several rows
        if not requests:
            return
        now_ns = time.time_ns()
        since_ns = now_ns - round(action.waited_s * 1e9)
        if action.batch not in self._stages:
            name = f"stage {action.stage}"
            attributes = {"multiworld.stage": action.stage, "multiworld.batch": action.batch}
            self._stages[action.batch] = [self._begin(name, span, since_ns, attributes) for span in requests]
        transfers = self._transfers[action.batch, worker.id]
        for stage in self._stages[action.batch]:
            if action.kind != "hedge":
                self._begin("queue", stage, since_ns, {}).end(now_ns)
            transfers.append(
                self._begin("transfer", stage, now_ns, _attributes(action, worker, version), kind=self._client)
            )

    def answered(self, batch: int, worker: Worker, compute_s: float, waited_s: float, transfer_s: float) -> None:
        """A worker has returned a batch. Half of the transfer counts as the way back."""
        computed_ns = time.time_ns() - round(transfer_s / 2 * 1e9)
        for transfer in self._transfers.pop((batch, worker.id), ()):
            facts = {"multiworld.worker": worker.name}
            self._begin("compute", transfer, computed_ns - round(compute_s * 1e9), facts).end(computed_ns)
            transfer.set_attributes(
                {
                    "multiworld.compute_s": compute_s,
                    "multiworld.waited_s": waited_s,
                    "multiworld.transfer_s": transfer_s,
                }
            )
            transfer.end()

    def failed(self, batch: int, worker: Worker, why: str) -> None:
        """An attempt failed."""
        for transfer in self._transfers.pop((batch, worker.id), ()):
            transfer.set_status(self._status(self._error, why))
            transfer.end()

    def link_ended(self, worker: Worker) -> None:
        """The attempts in flight on this link failed."""
        for batch, _ in [key for key in self._transfers if key[1] == worker.id]:
            self.failed(batch, worker, f"the link broke: {worker.ending and worker.ending.cause}")

    def stage_ended(self, batch: int) -> None:
        """The batch moves to the next stage, is answered or is dropped."""
        for span in self._stages.pop(batch, ()):
            span.end()

    def _begin(
        self, name: str, parent: Any, start_ns: int, attributes: Mapping[str, str | int | bool], kind: Any | None = None
    ) -> Any:
        kinds = {} if kind is None else {"kind": kind}
        return self._tracer.start_span(
            name, context=self._inside(parent), start_time=start_ns, attributes=attributes, **kinds
        )


def _attributes(action: SendBatch, worker: Worker, version: str) -> dict[str, str | int | bool]:
    return {
        "multiworld.world": worker.id.world,
        "multiworld.generation": worker.generation,
        "multiworld.worker": worker.name,
        "multiworld.version": version,
        "multiworld.images": len(action.requests),
        "multiworld.kind": action.kind,
        "multiworld.attempt": action.attempt,
    }
