"""The spans of traced requests within the pipeline:

    POST /predict                     the request (server/request_traces.py)
      stage 0                         from when its batch could have gone to this stage until the stage has answered
        queue                         waiting in the leader
        transfer                      on the link and at the worker; one more for each time that it had to be sent again
          compute                     at the worker, which makes this span itself (workers/traces.py)
      stage 1 …

Requests of other traces share their batch: each trace has all spans of its own, so that it can be read by itself.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from server.link import Link
from server.request_traces import current_span
from server.scheduling.actions import SendBatch
from tracing import Tracing
from wire import Message, TraceContext


class BatchTraces:
    """Follows the batches that have traced requests in them. The others cost a look into an empty dictionary."""

    def __init__(self, tracing: Tracing) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        self._tracer = tracing.tracer
        self._inside = set_span_in_context
        self._client = SpanKind.CLIENT
        self._status, self._error = Status, StatusCode.ERROR
        self._requests: dict[int, Any] = {}
        """The span of each open request that is traced."""
        self._stages: dict[int, list[Any]] = {}
        """The spans of the stage that a batch is at, one for each traced request in it."""
        self._transfers: defaultdict[tuple[int, str], list[Any]] = defaultdict(list)
        """Those of each copy in flight, by batch and link."""

    def request_began(self, request: int) -> None:
        """A request comes into the pipeline, from the task that answers its client."""
        if (span := current_span.get()) is not None:
            self._requests[request] = span

    def request_ended(self, request: int) -> None:
        """It has its answer, or will get none."""
        self._requests.pop(request, None)

    def sent(self, action: SendBatch, link: Link) -> list[TraceContext]:
        """A batch goes out; gives what the worker is to know of it."""
        requests = [self._requests[request] for request in action.requests if request in self._requests]
        if not requests:
            return []
        now_ns = time.time_ns()
        since_ns = now_ns - round(action.waited_s * 1e9)
        if action.batch not in self._stages:
            name, facts = f"stage {action.stage}", {"multiworld.stage": action.stage, "multiworld.batch": action.batch}
            self._stages[action.batch] = [self._begin(name, span, since_ns, facts) for span in requests]
        transfers = self._transfers[action.batch, link.id]
        for stage in self._stages[action.batch]:
            if action.kind != "hedge":
                self._begin("queue", stage, since_ns, {}).end(now_ns)
            transfers.append(self._begin("transfer", stage, now_ns, _facts(action, link), kind=self._client))
        contexts = (transfer.get_span_context() for transfer in transfers)
        return [TraceContext(context.trace_id, context.span_id) for context in contexts]

    def answered(self, message: Message, link: Link, transfer_s: float) -> None:
        """A worker has answered a copy of a batch."""
        for transfer in self._transfers.pop((message.batch, link.id), ()):
            transfer.set_attributes(
                {
                    "multiworld.compute_s": message.compute_ns / 1e9,
                    "multiworld.waited_s": message.waited_ns / 1e9,
                    "multiworld.transfer_s": transfer_s,
                }
            )
            transfer.end()

    def failed(self, batch: int, link: Link, why: str) -> None:
        """A copy of a batch comes to nothing."""
        for transfer in self._transfers.pop((batch, link.id), ()):
            transfer.set_status(self._status(self._error, why))
            transfer.end()

    def link_ended(self, link: Link) -> None:
        """What was in flight there comes to nothing."""
        for batch, _ in [key for key in self._transfers if key[1] == link.id]:
            self.failed(batch, link, f"the link broke: {link.cause}")

    def stage_ended(self, batch: int) -> None:
        """The batch goes on to the next stage, has its answers, or is no more."""
        for span in self._stages.pop(batch, ()):
            span.end()

    def _begin(
        self, name: str, parent: Any, start_ns: int, facts: Mapping[str, str | int | bool], kind: Any | None = None
    ) -> Any:
        kinds = {} if kind is None else {"kind": kind}
        return self._tracer.start_span(
            name, context=self._inside(parent), start_time=start_ns, attributes=facts, **kinds
        )


def _facts(action: SendBatch, link: Link) -> dict[str, str | int | bool]:
    return {
        "multiworld.world": link.world_name,
        "multiworld.epoch": link.epoch,
        "multiworld.worker": link.worker,
        "multiworld.version": action.version,
        "multiworld.images": len(action.requests),
        "multiworld.kind": action.kind,
        "multiworld.attempt": action.attempt,
    }
