"""The open requests, and the queues of those that wait for a batch."""

from __future__ import annotations

from collections import OrderedDict

from multiworld_serving.server.scheduling.events import RequestId
from multiworld_serving.server.scheduling.priority_map import PriorityMap
from multiworld_serving.server.scheduling.state import Request


class Backlog:
    """All open requests. Each one is in `waiting`, in `isolated` or in a batch.

    `waiting` is the FIFO queue from which batches are formed. `isolated` holds the suspect requests, which are sent alone.
    """

    def __init__(self) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.waiting: OrderedDict[RequestId, Request] = OrderedDict()
        self.isolated: OrderedDict[RequestId, Request] = OrderedDict()
        self.deadlines: PriorityMap[Request, float] = PriorityMap()

    def admit(self, request: Request) -> None:
        """Add a new request at the end of the queue."""
        self.requests[request.id] = request
        self.waiting[request.id] = request
        self.deadlines.set(request, request.deadline_s)

    def oldest(self) -> Request | None:
        """The head of the queue."""
        return next(iter(self.waiting.values()), None)

    def take(self, max_rows: int) -> tuple[Request, ...]:
        """Remove the next requests from the queue, at most `max_rows`."""
        return tuple(self.waiting.popitem(last=False)[1] for _ in range(min(max_rows, len(self.waiting))))

    def take_isolated(self) -> tuple[Request, ...]:
        """Remove the next suspect request."""
        return (self.isolated.popitem(last=False)[1],)

    def requeue(self, request: Request) -> None:
        """Take the request out of its batch and put it at the head of its queue. It starts again at the first stage."""
        queue = self.isolated if request.isolated else self.waiting
        request.batch = None
        queue[request.id] = request
        queue.move_to_end(request.id, last=False)

    def isolate(self, request: Request) -> None:
        """Take the request out of its batch. It starts again at the first stage, alone."""
        request.batch = None
        request.isolated = True
        self.isolated[request.id] = request

    def close(self, request: Request) -> None:
        """Remove a request that is answered, refused or cancelled."""
        del self.requests[request.id]
        self.deadlines.discard(request)
        self.waiting.pop(request.id, None)
        self.isolated.pop(request.id, None)
