"""The open requests of the scheduler, and the queue from which batches are formed."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice, takewhile

from multiworld_serving.server.leader.scheduling.batches import Request
from multiworld_serving.server.leader.scheduling.events import BatchId, RequestId
from multiworld_serving.server.leader.scheduling.priority_map import PriorityMap


class Backlog:
    """All open requests. Each one is in `waiting`, in `isolated` or in a batch.

    `waiting` is the FIFO queue from which batches are formed, each from requests with one key. `isolated` holds the suspect requests,
    which are sent by parts of the batch that failed.

    Attributes:
        max_rows: of a batch.
    """

    def __init__(self, max_rows: int) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.waiting: OrderedDict[RequestId, Request] = OrderedDict()
        self.isolated: OrderedDict[RequestId, Request] = OrderedDict()
        self.deadlines: PriorityMap[Request, float] = PriorityMap()
        self.max_rows = max_rows
        self._by_key: dict[str, OrderedDict[RequestId, Request]] = {}
        """The waiting requests by key, in the same order. No value is empty."""
        self._full: dict[str, None] = {}
        """Keys whose requests fill a batch, in the order in which they became full."""

    def admit(self, request: Request) -> None:
        """Add a new request at the end of the queue."""
        self.requests[request.id] = request
        self._wait(request)
        self.deadlines.set(request, request.deadline_s)

    def admit_step(self, request: Request) -> None:
        """Add a request of a session, which waits elsewhere."""
        self.requests[request.id] = request
        self.deadlines.set(request, request.deadline_s)

    def limit_rows(self, max_rows: int) -> None:
        """Set the maximum rows of a batch."""
        if max_rows != self.max_rows:
            self.max_rows = max_rows
            self._full = {key: None for key, members in self._by_key.items() if len(members) >= max_rows}

    def oldest(self) -> Request | None:
        """The head of the queue."""
        return next(iter(self.waiting.values()), None)

    @property
    def first_full(self) -> str | None:
        """The key that has filled a batch for the longest time; None if no key does."""
        return next(iter(self._full), None)

    def is_full(self, key: str) -> bool:
        """Whether the requests with this key fill a batch."""
        return key in self._full

    def take(self, key: str) -> tuple[Request, ...]:
        """Remove the next requests with this key from the queue, as many as fit into a batch."""
        members = self._by_key[key]
        taken = tuple(islice(members.values(), self.max_rows))
        for request in taken:
            del members[request.id], self.waiting[request.id]
        self._removed(key, members)
        return taken

    def take_isolated(self) -> tuple[Request, ...]:
        """Remove the suspect requests of the next part."""
        part = next(iter(self.isolated.values())).part
        taken = tuple(takewhile(lambda request: request.part == part, self.isolated.values()))
        for request in taken:
            del self.isolated[request.id]
        return taken

    def requeue(self, request: Request) -> None:
        """Take the request out of its batch and put it at the head of its queue. It starts again at the first stage."""
        request.batch = None
        if request.part:
            self.isolated[request.id] = request
            self.isolated.move_to_end(request.id, last=False)
        else:
            self._wait(request)
            self.waiting.move_to_end(request.id, last=False)
            self._by_key[request.key].move_to_end(request.id, last=False)

    def isolate(self, request: Request, part: tuple[BatchId, int]) -> None:
        """Take the request out of its batch. It starts again at the first stage, with this part of the batch."""
        request.batch = None
        request.part = part
        self.isolated[request.id] = request

    def close(self, request: Request) -> None:
        """Remove a request that is answered, rejected or cancelled."""
        del self.requests[request.id]
        self.deadlines.discard(request)
        self.isolated.pop(request.id, None)
        if self.waiting.pop(request.id, None) is not None:
            members = self._by_key[request.key]
            del members[request.id]
            self._removed(request.key, members)

    def _wait(self, request: Request) -> None:
        """Add the request at the end of `waiting` and of its key."""
        key = request.key
        self.waiting[request.id] = request
        members = self._by_key.get(key)
        if members is None:
            members = self._by_key[key] = OrderedDict()
        members[request.id] = request
        if len(members) >= self.max_rows:
            self._full[key] = None

    def _removed(self, key: str, members: OrderedDict[RequestId, Request]) -> None:
        """Requests with this key were removed."""
        if len(members) < self.max_rows:
            self._full.pop(key, None)
        if not members:
            del self._by_key[key]
