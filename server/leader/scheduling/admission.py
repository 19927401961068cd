"""Admission: decides on arrival whether a request is accepted, and rejects it with a reason and the time after which to retry.

This is where overload is decided for the service as a whole: the queue is full (`queue_limit`), or the deadline is too near for the
requests that are ahead. Other modules only bound the memory and the connections that a request uses before it arrives here, and reject
what exceeds the bound:

    common/http/server.py        connections (`max_connections`) → 503
    server/frontend/http/open_request.py  size of one body (`max_body_bytes`) → 413; bytes of all bodies in memory → 429 overloaded
    common/daemon_threads.py     images that wait to be decoded → 429 overloaded

`window` and `max_batch_size` limit what is in flight on a replica; they delay requests and never reject them.
"""

from __future__ import annotations

from multiworld_serving.server.leader.scheduling.actions import Reject
from multiworld_serving.server.leader.scheduling.events import RequestArrived
from multiworld_serving.server.leader.scheduling.state import SchedulerState

_MARGIN = 1.5
"""A request is accepted only if the time to its deadline is at least this many times the estimated completion time: a request
that expires in the queue has delayed others."""
_UNKNOWN_S = 1.0
"""Time after which to retry while the time of a full batch is not known."""
_LONGEST_S = 60.0


def rejection(event: RequestArrived, state: SchedulerState) -> Reject | None:
    """Why the samples of a request that arrives now are rejected; None if they are accepted."""
    table = state.table
    if not table.was_complete:
        return Reject(event.request, "not_ready", "not every stage has had a replica yet")
    if table.unavailable:
        return Reject(event.request, "no_replica", table.no_replica_detail())
    remaining_s = event.deadline_s - state.now_s
    if remaining_s <= 0:
        return Reject(event.request, "deadline", "the deadline had passed on arrival")
    ahead = event.rows - 1
    waiting, open_requests = len(state.backlog.waiting) + ahead, len(state.backlog.requests) + ahead
    if waiting >= state.config.queue_limit:
        retry_after_s = min(state.min_time_s(waiting) or _UNKNOWN_S, _LONGEST_S)
        return Reject(event.request, "overloaded", f"the queue is full: {waiting} requests are waiting", retry_after_s)
    needed_s = _MARGIN * state.min_time_s(open_requests)
    if needed_s > remaining_s:
        detail = f"{open_requests} requests are ahead, which takes about {needed_s:.1f} s; the deadline is in {remaining_s:.1f} s"
        return Reject(event.request, "overloaded", detail, needed_s - remaining_s)
    return None
