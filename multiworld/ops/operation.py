"""The operations of a world. Creating one has no side effects; `World.start` starts it, and the caller awaits it."""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work

from multiworld.execution import cuda
from multiworld.execution.outcome import Outcome
from multiworld.ops.buffers import byte_view

logger = logging.getLogger(__name__)

Status = Literal["pending", "done", "failed"]
Algorithm = Callable[[Any], Coroutine[Any, Any, None]]
"""The algorithm of a collective; its argument is a `multiworld.collectives.channel.CollectiveChannel`.

Raises RuntimeError when a connection is lost, WorldError when the world has ended.
"""
Post = Callable[[ProcessGroup], Work]
"""Hands an operation to c10d's NCCL group."""
_NO_DATA = torch.empty(0, dtype=torch.uint8)
NO_MEMORY = memoryview(b"")


@dataclass(slots=True, eq=False, kw_only=True)
class Operation:
    """An operation with checked arguments. After `World.start` it is pending: await it, or poll `done`.

    Raises, when awaited:
        BrokenWorldException: a member failed; the content of the tensors is undefined.
        WorldClosedError: this process closed the world.
    Cancelling a task that awaits a pending operation breaks its world, because messages may be partly sent. Other worlds are unaffected.

    Attributes:
        signature: what must be equal at the members, as text: dtype and size of a tensor, or name and arguments of a collective.
        peer: rank of the other member; -1 for a collective.
        tensors: the caller's tensors; the operation keeps them alive.
        staged: whether the data must be copied between a device and the host, which may block and must not run on an event loop.
        copy_back: copies the results to the caller's tensors; None if the results are written into them directly.
    """

    signature: str
    peer: int = -1
    tensors: tuple[Tensor, ...] = ()
    staged: bool = False
    copy_back: Callable[[], None] | None = None
    timeout_s: float | None = None
    future: asyncio.Future[None] = field(init=False)
    on_cancelled: Callable[["Operation"], Exception | None] = field(init=False)
    """Called when the caller is cancelled while the operation is pending. Returns the error that the world ended with."""
    task: asyncio.Task[None] | None = None
    """The task that runs the algorithm of a collective."""
    outcome: Outcome | None = None
    """Completes instead of `future` if a thread without an event loop has started the operation."""
    due_s: float = math.inf
    """When the world breaks if an operation with an `outcome` is still pending, by `time.monotonic`."""
    timer: asyncio.TimerHandle | None = None
    posted: bool = False
    """Whether `World.start` has returned the operation to its caller."""
    stream: Any = None
    """See `capture_stream`; None without CUDA tensors."""

    @property
    def name(self) -> str:
        """Return the name of the operation, for error messages."""
        return self.signature.partition("(")[0]

    def capture_stream(self) -> None:
        """Order an operation on CUDA tensors after what the calling thread has queued. Idempotent.

        Copies between GPU and host get a stream of their own: on the caller's, they would wait for work that it queues later.
        """
        if self.stream is None and self.tensors and self.tensors[0].is_cuda:
            device = self.tensors[0].device
            self.stream = cuda.copy_stream(device) if self.staged else cuda.current_stream(device)

    def done(self) -> bool:
        """Return whether the operation completed or failed."""
        return self.future.done()

    @property
    def status(self) -> Status:
        return status_of(self.future)

    def __await__(self) -> Generator[Any, None, None]:
        return self.finish().__await__()

    async def finish(self) -> None:
        """Wait for the operation; same as awaiting it. Raises the errors named in the class."""
        try:
            await self.future
        except asyncio.CancelledError:
            if self.future.done() and not self.future.cancelled():
                raise
            ending = self.on_cancelled(self)
            if ending is not None and not _is_being_cancelled():  # another awaiting task was cancelled
                raise ending from None
            raise

    def add_done_callback(self, callback: Callable[[object], object]) -> None:
        """Call `callback` on the event loop soon after the operation has completed or failed."""
        self.future.add_done_callback(callback)

    def resolve(self, error: BaseException | None) -> None:
        """Complete the operation, with `error` if not None. May be called from any thread.

        No effect if the operation is already complete or its event loop is closed.
        """
        if self.outcome is not None:
            self.outcome.complete(error)
            return
        loop = self.future.get_loop()
        try:
            if asyncio._get_running_loop() is not loop:
                loop.call_soon_threadsafe(self._complete, error)
            elif self.posted:
                self._complete(error)
            else:  # complete on the next iteration, so that a loop of sends cannot block the event loop
                loop.call_soon(self._complete, error)
        except RuntimeError:
            logger.debug("%s: the event loop that awaited it is closed", self.name)

    def _complete(self, error: BaseException | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.task is not None and error is not None:
            self.task.cancel()
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)
            self.future.exception()  # mark as retrieved: asyncio logs errors of futures that nobody awaits


@dataclass(slots=True, eq=False, kw_only=True)
class Message(Operation):
    """Carries one message: of a collective, or of a `Send` or `Receive`.

    Attributes:
        tag: messages with the same tag arrive in order.
        head: for a send, the complete head; for a receive, the expected signature (multiworld/transport/wire.py).
        data: the sent or receiving tensor. None while it is being copied from a device, for a receive of unknown size, and at the end.
        memory: the bytes of `data`; keeps it alive.
        collective: for one message of a collective: the collective.
    """

    tag: int
    head: bytes = b""
    data: Tensor | None = None
    memory: memoryview = NO_MEMORY
    collective: "Collective | None" = None

    def set_data(self, data: Tensor) -> None:
        """Use the memory of `data`, a contiguous tensor on the host."""
        self.data = data
        self.memory = byte_view(data)


@dataclass(slots=True, eq=False, kw_only=True)
class Send(Message):
    """Sends a tensor or a message.

    Attributes:
        header: header of a message that travels in place of the signature; see multiworld/ops/p2p.py. A tensor of `allocate` may not be
            changed then until it is dropped, so a send in place is complete when it is announced.
    """

    header: bytes | None = None

    @property
    def name(self) -> str:
        return "send"


@dataclass(slots=True, eq=False, kw_only=True)
class Receive(Message):
    """Receives a tensor or a message.

    Attributes:
        view: for a message of unknown size; it provides the memory when the head has arrived. See multiworld/ops/p2p.py.
    """

    view: "View | None" = None

    @property
    def name(self) -> str:
        return "recv"


@dataclass(slots=True, eq=False, kw_only=True)
class Collective(Operation):
    """A collective. The members compare its signature before data moves if `verify_collectives` is set.

    Attributes:
        algorithm: copies the data to the host and returns the algorithm to run over the connections of the world.
        post: hands the collective to NCCL; None if the connections of the world carry it.
        splits_bytes: for an all-to-all, the bytes sent to each rank and the bytes expected from each rank.
        number: identifies the collective at all members if they may start it in different order; None: they start it in equal order.
    """

    algorithm: Callable[[], Algorithm]
    post: Post | None = None
    splits_bytes: tuple[list[int], list[int]] | None = None
    number: int | None = None


class View:
    """A received message. Its data is in shared memory of the sender, or in memory of this process if it could not be sent so.

    The sender keeps the memory until all tensors that use it are dropped. Until then the data does not change, also when the world ends
    or the sender dies. Tensors may be written: this changes only the memory of this process.

    Attributes:
        header: the sender's header, padded with zeros to MAX_HEADER_BYTES.
        data: uint8 [n].
        shared: whether the data lies in shared memory of the sender.

    Args:
        check: called with header and size in bytes; raises ValueError to refuse the message.
    """

    def __init__(self, check: Callable[[bytes, int], object]) -> None:
        self.header = b""
        self.data = _NO_DATA
        self.size_bytes = 0
        self._check = check
        self.shared = False

    # -- called by the connection --------------------------------------------------------------------------------------------

    def accept(self, header: bytes, size_bytes: int) -> None:
        """Check an announced message. Raises ValueError."""
        self._check(header, size_bytes)
        self.header, self.size_bytes = header, size_bytes

    def allocate(self) -> Tensor:
        """Provide memory of this process for the data."""
        self.data = torch.empty(self.size_bytes, dtype=torch.uint8)
        return self.data

    def place(self, data: Tensor) -> Tensor:
        """Use shared memory."""
        self.data, self.shared = data, True
        return data


def status_of(future: asyncio.Future[None]) -> Status:
    if not future.done():
        return "pending"
    return "failed" if future.cancelled() or future.exception() is not None else "done"


def _is_being_cancelled() -> bool:
    """Return whether the current task is being cancelled.

    A separate function, because a frame in the traceback of a CancelledError must not refer to the task: the garbage collector of
    Python 3.11 does not detect this cycle.
    """
    task = asyncio.current_task()
    return task is None or bool(task.cancelling())
