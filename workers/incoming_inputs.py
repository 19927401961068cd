"""Fetches the input of a batch whose rows are at other processes."""

from __future__ import annotations

import asyncio

import torch
from torch import Tensor

from multiworld_serving.common.edges.edge import EdgeError, TensorGoneError
from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.wire.inputs import BatchInputs, LostInput, Source


class InputLostError(Exception):
    """The input cannot be fetched.

    Attributes:
        lost: what to tell the leader.
    """

    def __init__(self, lost: LostInput) -> None:
        super().__init__(lost.detail)
        self.lost = lost


async def fetch_inputs(edges: Edges, inputs: BatchInputs, dtype: torch.dtype, sample_shape: tuple[int, ...]) -> Tensor:
    """The input of the batch, [rows, *sample_shape]. Its sources are fetched at the same time.

    Raises:
        InputLostError: at least one source failed.
    """

    def fetch(source: Source) -> asyncio.Future[Tensor]:
        shape = (len(source.at), *sample_shape)
        return asyncio.ensure_future(edges.fetch(source.holder, source.refs, dtype, shape))

    parts = await asyncio.gather(*map(fetch, inputs.sources), return_exceptions=True)
    failed: list[tuple[str, EdgeError]] = []
    fetched: list[tuple[tuple[int, ...], Tensor]] = []
    for source, part in zip(inputs.sources, parts, strict=True):
        if isinstance(part, EdgeError):
            failed.append((source.holder, part))
        elif isinstance(part, BaseException):
            raise part
        else:
            fetched.append((source.at, part))
    if failed:
        holders = tuple(holder for holder, _ in failed)
        unreachable = tuple(holder for holder, error in failed if not isinstance(error, TensorGoneError))
        raise InputLostError(LostInput(holders, unreachable, "; ".join(str(error) for _, error in failed)))
    if inputs.relayed is not None:
        fetched.append((inputs.relayed_at, inputs.relayed))
    return _assembled(fetched, inputs.rows, dtype, sample_shape)


def _assembled(
    parts: list[tuple[tuple[int, ...], Tensor]], rows: int, dtype: torch.dtype, sample_shape: tuple[int, ...]
) -> Tensor:
    """All rows in their order; those that no part has are zeros. A single part that is the whole batch is not copied."""
    if len(parts) == 1 and parts[0][0] == tuple(range(rows)):
        return parts[0][1]
    batch = torch.zeros((rows, *sample_shape), dtype=dtype)
    for at, part in parts:
        batch[torch.tensor(at)] = part
    return batch
