"""One member's part of a planned operation: its tensors, the call, and the check of the result."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld import WorldCommunicator
from tests.torture.data import Box, moved, random_of, reduced, reduction
from tests.torture.schedule import Collective, Message

Check = Callable[[], None]
"""Raises WrongResultError."""


@contextmanager
def named_on_error(key: str) -> Iterator[None]:
    """Add the operation to a raised error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {key}")
        raise


class CollectivePart:
    """The part of rank `rank` of `size` in a collective. `start` calls it; `check` compares the results with the expected ones."""

    def __init__(self, here: WorldCommunicator, world: str, rank: int, size: int, planned: Collective) -> None:
        self._here = here
        self._world = world
        self._rank, self._size = rank, size
        self._planned = planned
        self._checks: list[Check] = []

    def start(self) -> Awaitable[None]:
        with named_on_error(f"{self._planned.key} ({self._planned.kind})"):
            method: Callable[[], Awaitable[None]] = getattr(self, f"_{self._planned.kind}")
            return method()

    def check(self) -> None:
        for check in self._checks:
            check()

    # -- tensors ---------------------------------------------------------------------------------------------------------------

    def _brought(self, rank: int, place: int = 0) -> Tensor:
        """The input of this rank; different for each index if it has several tensors."""
        planned, key = self._planned, f"{self._planned.key}/{rank}/{place}"
        if planned.op:
            return reduced(key, planned.dtype, planned.count, planned.op)
        return moved(key, planned.dtype, planned.count)

    def _reduced(self, place: int = 0) -> Tensor:
        return reduction([self._brought(rank, place) for rank in range(self._size)], self._planned.op)

    def _source(self, content: Tensor, name: str = "source") -> Tensor:
        """A tensor that is read and must not change."""
        box = self._box(content, name)
        self._checks.append(box.check_unchanged)
        return box.tensor

    def _target(self, expected: Callable[[], Tensor] | None, count: int | None = None, name: str = "target") -> Tensor:
        """A tensor that is only written, and its expected content; None if undefined."""
        count = self._planned.count if count is None else count
        return self._changed(moved(f"{self._key}/{name}/garbage", self._planned.dtype, count), expected, name)

    def _changed(self, content: Tensor, expected: Callable[[], Tensor] | None, name: str = "target") -> Tensor:
        """A tensor that holds `content` and is overwritten."""
        box = self._box(content, name)
        exact = not self._planned.op
        self._checks.append(lambda: box.check(expected() if expected is not None else None, exact=exact))
        return box.tensor

    def _box(self, content: Tensor, name: str) -> Box:
        return Box(f"{self._key}/{name}", content)

    @property
    def _key(self) -> str:
        return f"{self._planned.key}/{self._planned.kind}/{self._rank}"

    @property
    def _op(self) -> "ReduceOp | ReduceOp.RedOpType":
        op: ReduceOp.RedOpType = getattr(ReduceOp, self._planned.op)
        return op

    # -- collectives -----------------------------------------------------------------------------------------------------------

    def _barrier(self) -> Awaitable[None]:
        return self._here.barrier(self._world)

    def _broadcast(self) -> Awaitable[None]:
        root = self._planned.root
        content = self._brought(root)
        tensor = self._source(content) if self._rank == root else self._target(lambda: content)
        return self._here.broadcast(tensor, root, self._world)

    def _reduce(self) -> Awaitable[None]:
        root = self._planned.root
        tensor = self._changed(self._brought(self._rank), self._reduced if self._rank == root else None)
        return self._here.reduce(tensor, root, self._op, self._world)

    def _all_reduce(self) -> Awaitable[None]:
        return self._here.all_reduce(self._changed(self._brought(self._rank), self._reduced), self._op, self._world)

    def _gather(self) -> Awaitable[None]:
        root = self._planned.root
        outputs = self._targets() if self._rank == root else None
        return self._here.gather(self._source(self._brought(self._rank)), outputs, root, self._world)

    def _scatter(self) -> Awaitable[None]:
        root = self._planned.root
        inputs = self._sources() if self._rank == root else None
        return self._here.scatter(self._target(lambda: self._brought(root, self._rank)), inputs, root, self._world)

    def _all_gather(self) -> Awaitable[None]:
        return self._here.all_gather(self._targets(), self._source(self._brought(self._rank)), self._world)

    def _all_gather_into_tensor(self) -> Awaitable[None]:
        def expected() -> Tensor:
            return torch.cat([self._brought(rank) for rank in range(self._size)])

        output = self._target(expected, self._planned.count * self._size)
        return self._here.all_gather_into_tensor(output, self._source(self._brought(self._rank)), self._world)

    def _reduce_scatter(self) -> Awaitable[None]:
        output = self._target(lambda: self._reduced(self._rank))
        return self._here.reduce_scatter(output, self._sources(), self._op, self._world)

    def _reduce_scatter_tensor(self) -> Awaitable[None]:
        output = self._target(lambda: self._reduced(self._rank))
        whole = torch.cat([self._brought(self._rank, place) for place in range(self._size)])
        return self._here.reduce_scatter_tensor(output, self._source(whole), self._op, self._world)

    def _all_to_all(self) -> Awaitable[None]:
        """Each pair of ranks exchanges a different number of elements."""
        inputs = [self._source(self._sent(self._rank, rank), f"to {rank}") for rank in range(self._size)]
        outputs = [self._arriving(rank) for rank in range(self._size)]
        return self._here.all_to_all(outputs, inputs, self._world)

    def _sent(self, src: int, dst: int) -> Tensor:
        planned, key = self._planned, f"{self._planned.key}/{src}/{dst}"
        share = random_of(f"{key}/share").choice((0.0, 0.3, 1.0))
        return moved(key, planned.dtype, int(planned.count * share))

    def _arriving(self, src: int) -> Tensor:
        content = self._sent(src, self._rank)
        return self._target(lambda: content, content.numel(), f"from {src}")

    def _sources(self) -> list[Tensor]:
        return [self._source(self._brought(self._rank, place), f"source {place}") for place in range(self._size)]

    def _targets(self) -> list[Tensor]:
        return [self._output(rank) for rank in range(self._size)]

    def _output(self, rank: int) -> Tensor:
        return self._target(lambda: self._brought(rank), name=f"target {rank}")


class MessagePart:
    """The sender's or the receiver's part of a message."""

    def __init__(self, here: WorldCommunicator, world: str, rank: int, planned: Message) -> None:
        self._here = here
        self._world = world
        self._planned = planned
        self._content = moved(planned.key, planned.dtype, planned.count)
        self._sends = rank == planned.src
        garbage = moved(f"{planned.key}/garbage", planned.dtype, planned.count)
        self._box = Box(f"{planned.key}/message/{rank}", self._content if self._sends else garbage)

    @property
    def stream(self) -> tuple[bool, int, int]:
        """Messages of one stream arrive in order."""
        planned = self._planned
        return self._sends, planned.dst if self._sends else planned.src, planned.tag

    def start(self) -> Awaitable[None]:
        """With a handle or a coroutine, the same for all messages of a stream."""
        here, planned, world = self._here, self._planned, self._world
        by_handle = random_of(f"{planned.key.rpartition('/')[0]}/{self.stream}").random() < 0.5
        with named_on_error(planned.key):
            if self._sends:
                send = here.isend if by_handle else here.send
                return send(self._box.tensor, planned.dst, world, tag=planned.tag)
            recv = here.irecv if by_handle else here.recv
            return recv(self._box.tensor, planned.src, world, tag=planned.tag)

    def check(self) -> None:
        self._box.check(self._content)
