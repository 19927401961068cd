"""One operation of a world: the plan of it, which touches nothing, and the pending operation that its caller awaits."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work

if TYPE_CHECKING:
    from multiworld.exchange import Exchange

logger = logging.getLogger(__name__)

Status = Literal["pending", "done", "failed"]


@dataclass(slots=True, eq=False, kw_only=True)
class Plan:
    """What an operation is going to do, with its arguments checked. Making one sends nothing.

    Attributes:
        name: of the operation, for messages.
        signature: what the members must agree on, in words; checked mode compares it before anything else is sent.
        post: hands it to c10d. None for what goes over the lines by its script.
        deliver: brings the results to the caller's tensors where c10d could not write into them directly.
        tensors: kept alive until c10d has let go of them, whatever the caller does.
        staged: whether `post` has to move data off a device first, which may take long and must not hold up an event loop.
        peer: the other rank of a send or receive, -1 for a collective.
        tag, size_bytes: of a send or receive.
        buffer: of what goes over lines, its data on the host, contiguous.
        script: does it over the lines, given its buffer.
        splits_bytes: of an all-to-all, how much goes to each rank and how much is expected from each.
    """

    name: str
    signature: str
    post: Callable[[ProcessGroup], Work] | None = None
    tensors: tuple[Tensor, ...] = ()
    deliver: Callable[[], None] | None = None
    staged: bool = False
    peer: int = -1
    tag: int = 0
    size_bytes: int = 0
    buffer: Callable[[], Tensor] | None = None
    script: "Callable[[Exchange, Tensor], Coroutine[Any, Any, None]] | None" = None
    splits_bytes: tuple[list[int], list[int]] | None = None


class Carrier(Protocol):
    """The world that carries an operation."""

    def on_cancelled(self, operation: "Operation") -> Exception | None:
        """Its caller was cancelled while it was pending. Gives what the world ended with."""


@dataclass(slots=True, eq=False)
class Operation:
    """An operation under way. Await it, or ask `done`.

    Raises, when awaited:
        BrokenWorldException: a member failed; what the tensors hold is undefined.
        WorldClosedError: we closed the world meanwhile.
    Cancelling who awaits it breaks its world, and no other: a half-sent message has no owner.
    """

    plan: Plan
    timeout_s: float | None
    future: asyncio.Future[None]
    carrier: Carrier
    works: list[Work] = field(default_factory=list)
    exchange: "Exchange | None" = None
    """Its messages, where it has some of its own."""
    task: asyncio.Task[None] | None = None
    """What runs its script."""
    agreed: bool = False
    """Whether all members are known to be about to do it; of collectives in checked mode."""
    timer: asyncio.TimerHandle | None = None
    posted: bool = False
    """Whether its caller has it already."""
    stream: Any = None
    """The CUDA stream that was current when it was asked for, where that matters."""
    started_s: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def peer(self) -> int:
        return self.plan.peer

    def done(self) -> bool:
        """Whether it completed or failed."""
        return self.future.done()

    @property
    def status(self) -> Status:
        if not self.future.done():
            return "pending"
        return "failed" if self.future.cancelled() or self.future.exception() is not None else "done"

    def __await__(self) -> Generator[Any, None, None]:
        return self.finish().__await__()

    async def finish(self) -> None:
        """What awaiting it does."""
        try:
            await self.future
        except asyncio.CancelledError:
            if self.future.done() and not self.future.cancelled():
                raise
            ending = self.carrier.on_cancelled(self)
            if ending is not None and not _is_being_cancelled():  # another task that awaited it was
                raise ending from None
            raise

    def resolve(self, error: BaseException | None) -> None:
        """Wake the caller, from any thread. Harmless when it has gone away, or its loop has."""
        loop = self.future.get_loop()
        try:
            if asyncio._get_running_loop() is not loop:
                loop.call_soon_threadsafe(self._settle, error)
            elif self.posted:
                self._settle(error)
            else:  # done at once: the loop has its turn all the same, or who sends and sends would never let it
                loop.call_soon(self._settle, error)
        except RuntimeError:
            logger.debug("%s: the event loop that awaited it is closed", self.name)

    def _settle(self, error: BaseException | None) -> None:
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
            self.future.exception()  # a handle that nobody awaits is no reason for asyncio to complain


@dataclass(slots=True, eq=False)
class Part:
    """One message of a collective, under way.

    Attributes:
        on_carried: called under the world's lock, on any thread.
    """

    whole: Operation
    on_carried: Callable[[], object]


def _is_being_cancelled() -> bool:
    """Whether this task is. A function, for a frame in the traceback of a task's cancellation must not name the task: Python 3.11's
    garbage collector does not see such a cycle."""
    task = asyncio.current_task()
    return task is None or bool(task.cancelling())
