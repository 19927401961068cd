"""The tensors that a process keeps for others to fetch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from multiworld_serving.common.edges.metrics import EdgeMetrics
from multiworld_serving.common.wire.inputs import ALL_ROWS, RowRef, join_rows

Allocate: TypeAlias = Callable[[Sequence[int], torch.dtype], Tensor]
"""Returns an uninitialized contiguous tensor of this shape and dtype."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A kept tensor.

    Attributes:
        taken: rows that were sent to their last consumer.
        timer: frees the tensor.
    """

    tensor: Tensor
    owner: object
    taken: set[int] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None


class TensorStore:
    """Keeps tensors by id until they are released. Ids are never reused. Not thread-safe.

    Args:
        budget_bytes: most bytes kept at once.
        min_bytes: smaller tensors are not kept. Fetching them costs more than sending them with the message that would name them.

    Attributes:
        used_bytes: bytes kept now.
    """

    def __init__(self, budget_bytes: int, metrics: EdgeMetrics, min_bytes: int = 0) -> None:
        self.used_bytes = 0
        self._min_bytes = min_bytes
        self._budget_bytes = budget_bytes
        self._metrics = metrics
        self._entries: dict[int, _Entry] = {}
        self._next = 1
        metrics.budget_bytes.set(budget_bytes)
        metrics.retained_bytes.set_function(lambda: self.used_bytes)

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, owner: object, tensor: Tensor, *, expires_s: float | None = None) -> int | None:
        """Keep a tensor on the CPU. The caller must not change it any more.

        Args:
            owner: for `drop_owner`.
            expires_s: free it after this time: frontends fetch single rows, and none tells when it is not needed any more.
        Returns:
            Its id; None if it is too small, or the budget is used up. It must then be sent through the leader.
        """
        fetched = tensor if expires_s is None else tensor[:1]
        if fetched.nbytes < self._min_bytes:
            return None
        if self.used_bytes + tensor.nbytes > self._budget_bytes:
            self._metrics.budget_exceeded.inc()
            return None
        number, self._next = self._next, self._next + 1
        self._entries[number] = _Entry(tensor, owner)
        self.used_bytes += tensor.nbytes
        if expires_s is not None:
            self.expire(number, expires_s)
        return number

    def rows(self, refs: Sequence[RowRef], allocate: Allocate | None = None, row_bytes: int = 0) -> Tensor | None:
        """The referenced rows, concatenated; None if one of them is not here. A single reference is a view, not a copy.

        Args:
            allocate: makes the memory for several references.
            row_bytes: see `Fetch`.
        """
        parts = []
        for number, row in refs:
            entry = self._entries.get(number)
            if entry is None or not (row == ALL_ROWS or 0 <= row < len(entry.tensor)):
                return None
            parts.append(entry.tensor if row == ALL_ROWS else entry.tensor[row : row + 1])
        first = parts[0]
        packed = bool(row_bytes) and first.dtype == torch.uint8 and first.dim() == 2
        row_shape = torch.Size((row_bytes,)) if packed else first.shape[1:]
        if any(part.dtype != first.dtype or part.dim() != first.dim() or part.shape[1:] > row_shape for part in parts):
            return None
        if len(parts) == 1 and first.shape[1:] == row_shape:
            return first
        shape = (sum(map(len, parts)), *row_shape)
        return join_rows(
            parts, torch.empty(shape, dtype=first.dtype) if allocate is None else allocate(shape, first.dtype)
        )

    def take(self, refs: Iterable[RowRef]) -> None:
        """These rows were sent to their last consumer. A tensor is released when all of its rows are taken."""
        for number, row in refs:
            entry = self._entries.get(number)
            if entry is None:
                continue
            entry.taken.update(range(len(entry.tensor)) if row == ALL_ROWS else (row,))
            if len(entry.taken) >= len(entry.tensor):
                self.release((number,))

    def release(self, numbers: Iterable[int], owner: object = None) -> None:
        """Free tensors. Unknown ids, and with `owner` those of other owners, are ignored."""
        for number in numbers:
            entry = self._entries.get(number)
            if entry is None or (owner is not None and entry.owner is not owner):
                continue
            del self._entries[number]
            if entry.timer is not None:
                entry.timer.cancel()
            self.used_bytes -= entry.tensor.nbytes

    def expire(self, number: int, after_s: float) -> None:
        """Free a tensor after this time."""
        entry = self._entries.get(number)
        if entry is None:
            return
        if entry.timer is not None:
            entry.timer.cancel()
        entry.timer = asyncio.get_running_loop().call_later(after_s, self.release, (number,))

    def drop_owner(self, owner: object, *, expiring: bool = True) -> None:
        """Free the tensors of an owner; without `expiring` only those that do not expire by themselves."""
        numbers = [
            number
            for number, entry in self._entries.items()
            if entry.owner is owner and (expiring or entry.timer is None)
        ]
        self.release(numbers)
