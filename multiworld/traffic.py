"""The operations of one world on their way: handed to c10d in order, awaited without holding up anybody, completed or failed.

A send or receive is waited for on a thread of the world's own, for c10d gives it no future: on a lane, as those of one direction,
peer and tag complete in order. A collective completes through its future. Whatever may take its time before its data moves (checked
collectives, tensors that cross through host memory, NCCL) does all of it on a lane; what ran on a CUDA stream is done when an
event on that stream says so.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from multiworld.agreement import DisagreementError, FramedReceive, agree, agree_on_splits, send_framed
from multiworld.errors import Cause, WorldError
from multiworld.lane import Lane
from multiworld.operation import Operation, Plan
from multiworld.process_group import FOREVER
from multiworld.waiters import Waiters

_LANES_KEPT = 64
"""Tags may be many; lanes that nobody uses are forgotten beyond this."""
_Posted = TypeVar("_Posted")


class TrafficWorld(Protocol):
    """What traffic asks of its world. All of it may be called from any thread."""

    name: str
    rank: int
    size: int

    def ending(self) -> WorldError | None:
        """What later operations raise; None while the world lives. A fresh one each time."""

    def break_(self, cause: Cause, rank: int, detail: str = "") -> None: ...

    def on_connection_failed(self, peer: int, detail: str) -> None:
        """c10d lost a connection, of `peer` where that is known."""

    def on_drained(self) -> None:
        """Somebody left, and now nothing is pending any more."""


class Traffic:
    """
    Args:
        lock: the world's. Nothing is posted once the world has ended.
        checked: agree on every operation before its data moves; on Gloo alone.
    """

    def __init__(self, world: TrafficWorld, lock: threading.RLock, *, checked: bool) -> None:
        self.draining = False
        """Somebody left: what is pending may still complete, and what fails learns of it when all has been freed."""
        self._world = world
        self._lock = lock
        self._checked = checked
        self._group: ProcessGroup | None = None
        self._pending: set[Operation] = set()
        self._casualties: list[Operation] = []
        self._waiters = Waiters(f"multiworld-{world.name}")
        self._collectives = Lane(self._waiters)
        self._messages: dict[tuple[str, int, int], Lane] = {}

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    def open(self, group: ProcessGroup) -> None:
        """Operations may start."""
        self._group = group

    # -- starting ------------------------------------------------------------------------------------------------------------

    def start(self, plan: Plan, timeout_s: float | None) -> Operation:
        """Hand an operation to c10d, or to its lane. Returns at once. Raises WorldError when the world cannot be used."""
        loop = asyncio.get_running_loop()
        operation = Operation(plan, timeout_s, loop.create_future(), self)
        with self._lock:  # the world must not end, and its waiting threads with it, before somebody waits
            if ending := self._world.ending():
                raise ending
            if self._group is None:
                raise WorldError(self._world.name, "still joining: await its initialisation before using it")
            self._pending.add(operation)
            try:
                self._set_off(operation, self._group)
            except RuntimeError as refusal:  # a connection is lost, or no thread is to be had: the world is breaking
                self._fail(operation, refusal.with_traceback(None))
            except BaseException:
                self._pending.discard(operation)
                raise
        if timeout_s is not None and not operation.done():
            operation.timer = loop.call_later(timeout_s, self._expire, operation)
        return operation

    def _set_off(self, operation: Operation, group: ProcessGroup) -> None:
        """Post it, unless that could take long or would overtake what has still to be posted: then queue it."""
        plan = operation.plan
        slow = plan.staged or _on_cuda(
            plan
        )  # copies from a device take their time, and NCCL connects lazily and blocks
        lane = self._collectives if plan.peer < 0 else self._lane(plan, slow)
        if self._checked and plan.name == "recv" and not slow:
            receive = FramedReceive(plan.signature, plan.peer, plan.tag)
            operation.works = [receive.post_frame(group)]
            lane.run(partial(self._carry, operation, partial(self._post_rest, operation, receive)))
        elif slow or lane.unposted or (self._checked and plan.peer < 0):
            if _on_cuda(plan):
                operation.stream = torch.cuda.current_stream(plan.tensors[0].device)
            lane.unposted += 1
            lane.run(partial(self._carry, operation, partial(self._post_late, operation, lane)))
        else:
            operation.works = self._post(plan, group)
            if plan.peer >= 0:
                lane.run(partial(self._carry, operation, None))
            else:
                operation.works[0].get_future().add_done_callback(partial(self._on_future, operation))

    def _post(self, plan: Plan, group: ProcessGroup) -> list[Work]:
        if self._checked and plan.name == "send":
            assert plan.buffer is not None
            return send_framed(group, plan.buffer(), plan.signature, plan.peer, plan.tag)
        return [plan.post(group)]

    def _lane(self, plan: Plan, slow: bool) -> Lane:
        """Messages of one direction, peer and tag complete in order; NCCL has one order for all with a peer."""
        key = ("nccl", plan.peer, 0) if slow and not plan.staged else (plan.name, plan.peer, plan.tag)
        lane = self._messages.get(key)
        if lane is None:
            if len(self._messages) >= _LANES_KEPT:
                self._messages = {key: lane for key, lane in self._messages.items() if lane.busy}
            lane = self._messages[key] = Lane(self._waiters)
        return lane

    # -- under way (on threads of the world's own) ---------------------------------------------------------------------------

    def _carry(self, operation: Operation, post: Callable[[], None] | None) -> None:
        """Post what has not been posted yet, wait, and bring the results to where they belong."""
        try:
            with _stream(operation.stream):
                if post is not None:
                    post()
                self._wait_for(operation)
                if operation.plan.deliver is not None:
                    operation.plan.deliver()
                if operation.stream is not None:
                    operation.stream.synchronize()
        except DisagreementError as error:
            self._world.break_(Cause.ERROR, error.rank, error.detail)
            self._fail(operation, RuntimeError(error.detail))
        except RuntimeError as error:
            self._fail(operation, error.with_traceback(None))  # a traceback holds tensors
        except WorldError as error:
            self._fail(operation, RuntimeError(str(error)))
        else:
            self._settle(operation)

    def _post_late(self, operation: Operation, lane: Lane) -> None:
        """Post an operation that queued; a collective of a checked world once everybody has agreed to it."""
        plan = operation.plan
        try:
            if self._checked and plan.name == "recv":
                receive = FramedReceive(plan.signature, plan.peer, plan.tag)
                operation.works = [self._post_unless_ended(receive.post_frame)]
                self._post_rest(operation, receive)
                return
            if self._checked and plan.peer < 0:
                group = self._post_unless_ended(lambda group: group)
                agree(group, self._world.size, plan.signature)
                if plan.splits_bytes is not None:
                    agree_on_splits(group, *plan.splits_bytes)
            operation.works = self._post_unless_ended(partial(self._post, plan), _on_cuda(plan))
        finally:
            with self._lock:
                lane.unposted -= 1

    def _post_rest(self, operation: Operation, receive: FramedReceive) -> None:
        """Wait for the frame of a message, and receive what did not fit into it."""
        assert operation.plan.buffer is not None
        self._wait_for(operation)
        rest = self._post_unless_ended(partial(receive.post_rest, data=operation.plan.buffer()))
        operation.works = [] if rest is None else [rest]

    def _post_unless_ended(self, post: Callable[[ProcessGroup], _Posted], slow: bool = False) -> _Posted:
        """Under the world's lock, unless that could be held for long. What is under way when a member leaves may go on."""
        with self._lock:
            ending, group = self._world.ending(), self._group
            if ending is not None and (group is None or not self.draining):
                raise ending
            assert group is not None
            if not slow:
                return post(group)
        return post(group)

    def _wait_for(self, operation: Operation) -> None:
        """Block until c10d is done. Raises RuntimeError."""
        if not _on_cuda(operation.plan) or operation.plan.staged:
            for work in operation.works:
                work.wait(FOREVER)
            return
        device = operation.plan.tensors[0].device
        with _stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            for work in operation.works:
                work.wait()  # orders this stream after the operation, and returns
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record()
        done.synchronize()
        if ending := self._world.ending():  # NCCL's abort ends its kernels, and so completes the event
            raise RuntimeError(str(ending))

    def _on_future(self, operation: Operation, future: "torch.futures.Future[Any]") -> None:
        """A collective is done. Called on Gloo's own thread, or at once where it was done already."""
        try:
            future.value()
            if operation.plan.deliver is not None:
                operation.plan.deliver()
        except RuntimeError as error:
            self._fail(operation, error.with_traceback(None))
        else:
            self._settle(operation)

    # -- the outcome (from any thread) -------------------------------------------------------------------------------------------

    def _settle(self, operation: Operation) -> None:
        # Without the lock, which another thread holds while it posts. In this order: whoever sets `draining` looks at `busy` after it.
        self._pending.discard(operation)
        operation.works = []
        operation.resolve(None)
        if self.draining and not self._pending:
            self._world.on_drained()

    def _fail(self, operation: Operation, error: RuntimeError) -> None:
        """Its caller learns why once that is known, which is when the world has been broken."""
        with self._lock:
            self._pending.discard(operation)
            ending = self._world.ending()
            if ending is None or self.draining:
                self._casualties.append(operation)
            drained = self.draining and not self._pending
        operation.works = []
        if drained:
            self._world.on_drained()
        if ending is None:
            self._world.on_connection_failed(operation.peer, f"{operation.name}: {error}")
        elif not self.draining:
            operation.resolve(ending)

    def _expire(self, operation: Operation) -> None:
        if operation in self._pending:
            detail = f"{operation.name} took over {operation.timeout_s:g} s"
            self._world.break_(Cause.TIMEOUT, operation.peer, detail)

    def on_cancelled(self, operation: Operation) -> WorldError | None:
        self._world.break_(Cause.ABORTED, self._world.rank, f"{operation.name} cancelled")
        return self._world.ending()

    # -- ending (on the world's reclaiming thread) ---------------------------------------------------------------------------------

    def take_group(self) -> ProcessGroup | None:
        """The group, to be aborted. Nothing will be posted to it any more."""
        with self._lock:
            group, self._group = self._group, None
        return group

    def end(self, timeout_s: float) -> bool:
        """Wake whoever still waits; the group has been aborted. False when a thread did not come back from c10d."""
        with self._lock:
            self.draining = False
            casualties, self._casualties = self._casualties, []
        for operation in casualties:
            operation.resolve(self._world.ending())
        del casualties
        back = self._waiters.close(timeout_s)
        with self._lock:
            left, self._pending = self._pending, set()
        for operation in left:
            operation.resolve(self._world.ending())
        return back


def _on_cuda(plan: Plan) -> bool:
    return bool(plan.tensors) and plan.tensors[0].is_cuda


def _stream(stream: Any) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()
