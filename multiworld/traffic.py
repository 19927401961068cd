"""The operations of one world on their way: handed to a line or to c10d, awaited without holding up anybody, completed or failed.

A send or receive goes over the line to its peer (multiworld/line.py), driven by the event loop on which the world was formed; so do
the messages of a collective that has a script (multiworld/shares.py), and of the agreement before any collective of a checked world.
Other collectives complete through the future that c10d gives them. Whatever may take its time before or after its data moves (copies
from and to a device, NCCL) does that on a thread of the world's own; what ran on a CUDA stream is done when an event on that stream
says so.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch._C._distributed_c10d import ProcessGroup

from multiworld.agreement import DisagreementError, agree_on_splits
from multiworld.board import Board, board_of
from multiworld.concert import Concert
from multiworld.errors import Cause, WorldError
from multiworld.lane import Lane
from multiworld.line import Letter, Line, message_head, sealed
from multiworld.operation import Operation, Part, Plan
from multiworld.process_group import FOREVER
from multiworld.streams import on_stream
from multiworld.waiters import Waiters

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
        """A line to `peer`, or a connection of c10d's, was lost."""

    def on_line_nonsense(self, peer: int, detail: str) -> None:
        """`peer` sent what nobody waits for."""

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
        self._concert = Concert(self, lock, self._waiters, checked=checked)
        self._nccl: dict[int, Lane] = {}  # NCCL has one order for all messages with a peer
        self._lines: dict[int, Line] = {}
        self._board: Board | None = None

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    def open(self, group: ProcessGroup, socks: dict[int, socket.socket], board: Board) -> None:
        """Operations may start. `socks` are the connections of the lines, by rank. Raises OSError when the kernel has no room for them."""
        try:
            for peer, sock in socks.items():
                self._lines[peer] = Line(peer, sock, self._lock, self, board)
        except OSError:
            for line in self._lines.values():
                line.close()
            for sock in socks.values():
                sock.close()
            raise
        self._group = group
        self._board = board

    # -- starting ------------------------------------------------------------------------------------------------------------

    def start(self, plan: Plan, timeout_s: float | None) -> Operation:
        """Hand an operation to its line, to c10d, or to its lane. Returns at once. Raises WorldError when the world cannot be used."""
        loop = asyncio.get_running_loop()
        operation = Operation(plan, timeout_s, loop.create_future(), self)
        with self._lock:  # the world must not end, and its waiting threads with it, before somebody waits
            if ending := self._world.ending():
                raise ending
            if self._group is None:
                raise WorldError(self._world.name, "still joining: await its initialisation before using it")
            self._come_along(loop)
            self._pending.add(operation)
            try:
                self._set_off(operation)
            except RuntimeError as refusal:  # a connection is lost, or no thread is to be had: the world is breaking
                self.fail([operation], operation.peer, refusal.with_traceback(None))
            except BaseException:
                self._pending.discard(operation)
                raise
        operation.posted = True
        if timeout_s is not None and not operation.done():
            operation.timer = loop.call_later(timeout_s, self._expire, operation)
        return operation

    def _come_along(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the lines served by this loop where the one on which the world was formed runs no more."""
        board = self._board
        if board is None or board.serves(loop) or board.running:
            return
        self._board = board_of(loop)
        for line in self._lines.values():
            line.move(self._board)

    def _set_off(self, operation: Operation) -> None:
        """Post it, unless that could take long, would overtake what has still to be posted, or must be agreed on: then queue it."""
        plan = operation.plan
        on_cuda = _on_cuda(plan)
        if on_cuda:
            operation.stream = torch.cuda.current_stream(plan.tensors[0].device)
        if plan.peer >= 0 and (plan.staged or not on_cuda):
            if plan.name == "send":
                self._write(operation)
            else:
                self._expect(operation)
            return
        if plan.peer < 0 and self._concert.concerns(operation, self._lines):
            self._concert.start(operation, self._lines)
        else:
            self.post(operation)

    def post(self, operation: Operation) -> None:
        """Hand a collective, or what NCCL carries, to c10d, or to its lane. Under the world's lock. Raises RuntimeError."""
        plan = operation.plan
        lane = self._collectives if plan.peer < 0 else self._nccl.setdefault(plan.peer, Lane(self._waiters))
        splits = self._checked and plan.splits_bytes is not None
        # Copies from a device take their time, and NCCL connects lazily and blocks.
        if plan.staged or _on_cuda(plan) or lane.unposted or splits:
            lane.unposted += 1
            lane.run(partial(self._carry, operation, lane))
        elif self._group is not None:
            assert plan.post is not None
            operation.works = [plan.post(self._group)]
            operation.works[0].get_future().add_done_callback(partial(self._on_future, operation))

    def _write(self, operation: Operation) -> None:
        """Give a message to its line: at once, to keep its place, though its data may still be on a device."""
        plan = operation.plan
        assert plan.buffer is not None
        letter = Letter(operation, message_head(plan.signature, plan.tag, plan.size_bytes))
        if not plan.staged:
            letter.put(plan.buffer())
        self._lines[plan.peer].send(letter, plan.tag)
        if plan.staged:
            self._waiters.run(partial(self._fetch, letter))

    def _expect(self, operation: Operation) -> None:
        plan = operation.plan
        assert plan.buffer is not None
        letter = Letter(operation, sealed(plan.signature))
        letter.put(plan.buffer())
        self._lines[plan.peer].receive(letter, plan.tag)

    # -- messages under way ------------------------------------------------------------------------------------------------------

    def _fetch(self, letter: Letter) -> None:
        """Bring the data of a message from its device, and send it. On a thread of the world's own."""
        operation = letter.freight
        assert isinstance(operation, Operation)
        assert operation.plan.buffer is not None
        try:
            with on_stream(operation.stream):
                data = operation.plan.buffer()
            with self._lock:
                letter.put(data)
                self._lines[operation.peer].advance(operation.plan.tag)
        except RuntimeError as error:
            self.fail([operation], operation.peer, error.with_traceback(None))

    def on_carried(self, freight: Operation | Part) -> None:
        """A line has done its part."""
        if isinstance(freight, Part):
            freight.on_carried()
        else:
            self.on_done(freight)

    def on_done(self, operation: Operation) -> None:
        if operation.plan.deliver is None:
            self._settle(operation)
            return
        try:
            self._waiters.run(partial(self._deliver, operation))
        except RuntimeError as error:
            self.fail([operation], operation.peer, error.with_traceback(None))

    def _deliver(self, operation: Operation) -> None:
        """Bring what came to where its receiver wants it. On a thread of the world's own."""
        try:
            with on_stream(operation.stream):
                assert operation.plan.deliver is not None
                operation.plan.deliver()
                if operation.stream is not None:
                    operation.stream.synchronize()
        except RuntimeError as error:
            self.fail([operation], operation.peer, error.with_traceback(None))
        else:
            self._settle(operation)

    def on_line_lost(self, peer: int, freights: list[Operation | Part], reason: str) -> None:
        operations = list(dict.fromkeys(each.whole if isinstance(each, Part) else each for each in freights))
        if operations:  # an idle line is missed when it is used: the lifeline may have a better reason by then
            self.fail(operations, peer, RuntimeError(reason))

    def on_line_nonsense(self, peer: int, detail: str) -> None:
        self._world.on_line_nonsense(peer, detail)

    def read(self) -> None:
        """Take what has come on all lines, for an event loop that may stand still."""
        with self._lock:
            for line in self._lines.values():
                line.read()

    # -- collectives over the lines (see `ConcertHost`) ------------------------------------------------------------------------

    def check(self) -> None:
        """Raises WorldError when the world has ended; what is under way when a member leaves may go on."""
        ending = self._world.ending()
        if ending is not None and (self._group is None or not self.draining):
            raise ending

    def on_abandoned(self, operation: Operation) -> None:
        self._world.break_(Cause.ABORTED, self._world.rank, f"{operation.name} cancelled")

    def on_dissent(self, rank: int, detail: str) -> None:
        self._world.on_line_nonsense(rank, detail)

    # -- other collectives, and what NCCL carries, under way (on threads of the world's own) ---------------------------------------

    def _carry(self, operation: Operation, lane: Lane) -> None:
        """Post it, wait, and bring the results to where they belong."""
        try:
            with on_stream(operation.stream):
                self._post_late(operation, lane)
                self._wait_for(operation)
                if operation.plan.deliver is not None:
                    operation.plan.deliver()
                if operation.stream is not None:
                    operation.stream.synchronize()
        except DisagreementError as error:
            self._world.break_(Cause.ERROR, error.rank, error.detail)
            self.fail([operation], operation.peer, RuntimeError(error.detail))
        except RuntimeError as error:
            self.fail([operation], operation.peer, error.with_traceback(None))  # a traceback holds tensors
        except WorldError as error:
            self.fail([operation], operation.peer, RuntimeError(str(error)))
        else:
            self._settle(operation)

    def _post_late(self, operation: Operation, lane: Lane) -> None:
        """Post an operation that queued; an all-to-all of a checked world once it is known how much comes from each."""
        plan = operation.plan
        assert plan.post is not None
        try:
            if self._checked and plan.splits_bytes is not None:
                agree_on_splits(self._post_unless_ended(lambda group: group), *plan.splits_bytes)
            operation.works = [self._post_unless_ended(plan.post, _on_cuda(plan))]
        finally:
            with self._lock:
                lane.unposted -= 1

    def _post_unless_ended(self, post: Callable[[ProcessGroup], _Posted], slow: bool = False) -> _Posted:
        """Under the world's lock, unless that could be held for long. What is under way when a member leaves may go on."""
        with self._lock:
            self.check()
            group = self._group
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
        with on_stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
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
            self.fail([operation], operation.peer, error.with_traceback(None))
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

    def fail(self, operations: Sequence[Operation], peer: int, error: RuntimeError) -> None:
        """Their callers learn why once that is known, which is when the world has been broken."""
        with self._lock:
            self._pending.difference_update(operations)
            ending = self._world.ending()
            if ending is None or self.draining:
                self._casualties += operations
            drained = self.draining and not self._pending
        for operation in operations:
            operation.works = []
        if drained:
            self._world.on_drained()
        if ending is None:
            self._world.on_connection_failed(peer, f"{operations[0].name}: {error}")
        elif not self.draining:
            for operation in operations:
                operation.resolve(self._world.ending())

    def _expire(self, operation: Operation) -> None:
        if operation in self._pending:
            detail = f"{operation.name} took over {operation.timeout_s:g} s"
            self._world.break_(Cause.TIMEOUT, operation.peer, detail)

    def on_cancelled(self, operation: Operation) -> WorldError | None:
        self._world.break_(Cause.ABORTED, self._world.rank, f"{operation.name} cancelled")
        return self._world.ending()

    # -- ending (on the world's reclaiming thread) ---------------------------------------------------------------------------------

    def take_group(self) -> ProcessGroup | None:
        """The group, to be aborted. Nothing will be posted to it any more, and the lines end."""
        with self._lock:
            group, self._group = self._group, None
            for line in self._lines.values():
                line.close()
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
