"""What a frontend keeps for workers to fetch, and fetches from them."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import torch
from torch import Tensor

from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.wire.inputs import RowRef
from multiworld_serving.server.predictor import KeptRows

_KEEP_S = 5.0
"""How long the input of a request that ended without an answer is kept: its batch may be on the way to a worker, with rows of others."""


class KeptInput(NamedTuple):
    """The input of a request, [N, …], and its id for workers; None if they cannot fetch it."""

    rows: Tensor
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

    def keep(self, rows: Tensor) -> KeptInput:
        """Keep an input until `release` or `expire`."""
        return KeptInput(rows, None if self._edges is None else self._edges.store.put(self, rows))

    def release(self, kept: KeptInput) -> None:
        """The request has its answer."""
        if self._edges is not None and kept.number is not None:
            self._edges.store.release((kept.number,))

    def expire(self, kept: KeptInput) -> None:
        """The request ended without an answer: keep its input a little longer."""
        if self._edges is not None and kept.number is not None:
            self._edges.store.expire(kept.number, _KEEP_S)

    async def fetch(self, kept: tuple[KeptRows, ...], sent: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
        """The output of a request, [count, …]. Raises EdgeError; ValueError if its rows have several shapes.

        Args:
            kept: the rows to fetch; at least one.
            sent: the other rows, in their order; None if there are none.
        """
        edges = self._edges
        assert edges is not None, "the leader was told that nothing is fetched"

        def fetch(part: KeptRows) -> asyncio.Future[Tensor]:
            refs = [RowRef(part.tensor, row) for row in part.rows]
            shape = (len(refs), *part.shape)
            return asyncio.ensure_future(edges.fetch(part.holder, refs, dtype, shape, take=True))

        fetched = await asyncio.gather(*map(fetch, kept))
        if len(fetched) == 1 and kept[0].at == tuple(range(count)):
            return fetched[0]
        if len({part.shape for part in kept}) > 1 or (sent is not None and tuple(sent.shape[1:]) != kept[0].shape):
            raise ValueError("the rows of an output have several shapes")
        output = torch.empty((count, *kept[0].shape), dtype=dtype)
        for part, rows in zip(kept, fetched, strict=True):
            output[list(part.at)] = rows
        if sent is not None:
            there = {at for part in kept for at in part.at}
            output[[at for at in range(count) if at not in there]] = sent
        return output
