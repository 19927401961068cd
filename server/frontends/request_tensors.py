"""What a frontend keeps for workers to fetch, and fetches from them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from multiworld_serving.common.edges import Edges
from multiworld_serving.common.wire import RowRef
from multiworld_serving.server.predictor import KeptRow

_KEEP_S = 5.0
"""How long the input of a request that ended without an answer is kept: its batch may be on the way to a worker, with rows of others."""


class KeptInput(NamedTuple):
    """The input row of a request, and its id for workers; None if they cannot fetch it."""

    row: Tensor
    number: int | None


class RequestTensors:
    """The inputs of open requests, and their answers.

    Args:
        edges: of this process; None: nothing is fetched.
    """

    def __init__(self, edges: Edges | None) -> None:
        self._edges = edges

    @property
    def fetches(self) -> bool:
        """Whether this frontend can fetch answers."""
        return self._edges is not None

    @contextlib.contextmanager
    def keeping(self, row: Tensor) -> Iterator[KeptInput]:
        """Keep an input while the block runs, and a little longer if it raises."""
        number = None if self._edges is None else self._edges.store.put(self, row[None])
        if self._edges is None or number is None:
            yield KeptInput(row, None)
            return
        try:
            yield KeptInput(row, number)
        except BaseException:
            self._edges.store.expire(number, _KEEP_S)
            raise
        self._edges.store.release((number,))

    async def fetch(self, kept: KeptRow, dtype: torch.dtype) -> Tensor:
        """The output row of an answer. Raises EdgeError."""
        assert self._edges is not None, "the leader was told that nothing is fetched"
        refs = (RowRef(kept.tensor, kept.row),)
        fetched = await self._edges.fetch(kept.holder, refs, dtype, (1, *kept.shape), take=True)
        return fetched[0]
