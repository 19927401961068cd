"""Every accepted request until it is closed, and those that wait for a batch."""

from __future__ import annotations

from collections import OrderedDict

from server.scheduling.batches import Request
from server.scheduling.events import RequestId
from server.scheduling.priority_map import PriorityMap


class Backlog:
    """Open requests. `waiting` is the queue that batches are formed from, first come first served; `isolated` holds
    the suspects, each of which will travel alone. A request is in one of them or in a batch."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.waiting: OrderedDict[RequestId, Request] = OrderedDict()
        self.isolated: OrderedDict[RequestId, Request] = OrderedDict()
        self.deadlines: PriorityMap[Request, float] = PriorityMap()

    def admit(self, request: Request) -> None:
        """Accept a newcomer at the end of the queue."""
        self.requests[request.id] = request
        self.waiting[request.id] = request
        self.deadlines.set(request, request.deadline_s)

    def oldest(self) -> Request | None:
        """The head of the queue."""
        return next(iter(self.waiting.values()), None)

    def take(self, max_rows: int) -> tuple[Request, ...]:
        """The next requests of the queue, to be made a batch."""
        return tuple(self.waiting.popitem(last=False)[1] for _ in range(min(max_rows, len(self.waiting))))

    def take_isolated(self) -> tuple[Request, ...]:
        """The next suspect."""
        return (self.isolated.popitem(last=False)[1],)

    def put_back(self, request: Request) -> None:
        """Out of its batch, to the head of its queue: it starts again."""
        line = self.isolated if request.isolated else self.waiting
        request.batch = None
        line[request.id] = request
        line.move_to_end(request.id, last=False)

    def isolate(self, request: Request) -> None:
        """Out of its batch, to travel alone from now on."""
        request.batch = None
        request.isolated = True
        self.isolated[request.id] = request

    def close(self, request: Request) -> None:
        """Answered, refused or withdrawn."""
        del self.requests[request.id]
        self.deadlines.discard(request)
        self.waiting.pop(request.id, None)
        self.isolated.pop(request.id, None)
