"""Reductions over the connections of a world: all-reduce, reduce and reduce-scatter.

Long tensors use a two-shot algorithm: each member reduces one share of the tensor and sends the result to the members that need it. Each
member sends as many bytes as in a ring all-reduce (2 · (n - 1) / n times the tensor), but in two steps instead of 2 · (n - 1), because
every member has a connection to every other. Shares are split into chunks, so that one chunk is reduced while others are transferred.
Short tensors use a one-shot algorithm: every member sends the whole tensor to every other. All members get bitwise equal results, because
each element is reduced either by one member or by all in rank order.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from multiworld.collectives.channel import RESULT, CollectiveChannel
from multiworld.collectives.transfers import all_carried, apart

Combine = Callable[..., Tensor]
"""A torch function of two tensors that supports `out`."""

COMBINE: dict[str, Combine] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
"""The function that combines two operands, by name of the `ReduceOp`."""

WHOLE_BYTES = 1 << 18
"""Maximum total bytes that a member sends in the one-shot algorithm."""
SERIAL = 1 << 15
"""Maximum elements per call of torch. Larger calls use torch's thread pool, and the pools of members on one machine compete for cores."""
PIECE_BYTES = 1 << 21
"""Size of a chunk in bytes. Reducing one chunk blocks the event loop for some tenths of a millisecond."""
AHEAD = 3
"""Number of chunk buffers per peer. They are reused, so that they stay in the CPU cache."""


async def all_reduce(exchange: CollectiveChannel, data: Tensor, op: str) -> None:
    """Reduce `data` in place.

    Args:
        data: [n], contiguous, on the host, same length and dtype at all members.
        op: a key of `COMBINE`; AVG divides by the number of members.
    Raises:
        RuntimeError: a connection is lost; the content of `data` is undefined.
        WorldError: the world has ended.
    """
    if data.nbytes * len(exchange.peers) <= WHOLE_BYTES:
        await _everybody_all(exchange, data, op)
    else:
        shares = dict(enumerate(torch.tensor_split(data, exchange.size)))
        await _each_its_share(exchange, shares, shares[exchange.rank], op, range(exchange.size))


async def reduce(exchange: CollectiveChannel, data: Tensor, dst: int, op: str) -> None:
    """Reduce `data` in place at rank `dst`; its content at other ranks is undefined. Arguments and errors as in `all_reduce`."""
    if exchange.size <= 2 or data.nbytes * len(exchange.peers) <= WHOLE_BYTES:
        shares = {dst: data}
    else:
        shares = dict(enumerate(torch.tensor_split(data, exchange.size)))
    await _each_its_share(exchange, shares, shares.get(exchange.rank), op, (dst,))


async def reduce_scatter(exchange: CollectiveChannel, shares: Sequence[Tensor], result: Tensor, op: str) -> None:
    """Reduce `shares[r]` of all members into `result` at rank r, for every r. The shares are not changed.

    Shares and result are like `data` of `all_reduce`; errors as in `all_reduce`.
    """
    sent = apart(dict(enumerate(shares)), {exchange.rank: result}, exchange.rank)
    await _each_its_share(exchange, sent, result, op, ())


async def _everybody_all(exchange: CollectiveChannel, data: Tensor, op: str) -> None:
    """One-shot all-reduce: send the whole tensor to every peer and reduce all operands in rank order."""
    others = {peer: torch.empty_like(data) for peer in exchange.peers}
    arrivals = [exchange.receive(peer, other) for peer, other in others.items()]
    departures = [exchange.send(peer, data) for peer in exchange.peers]
    await all_carried(arrivals)
    await all_carried(departures)  # `data` must not change while it is being sent
    operands = others | {exchange.rank: data}
    with torch.inference_mode():
        first, *rest = (operands[rank] for rank in range(exchange.size))
        for operand in rest:
            _combine(first, operand, first, op)
        if first is not data:
            for part, result in _serial(data, first):
                part.copy_(result)
        _average(data, op, exchange.size)


async def _each_its_share(
    exchange: CollectiveChannel, shares: Mapping[int, Tensor], result: Tensor | None, op: str, receivers: Sequence[int]
) -> None:
    """Two-shot reduction: reduce the share of this rank into `result` and send the result to `receivers`.

    A receiver gets each result in the memory of the share that it sent.

    Args:
        shares: by the rank that reduces the share; a rank without a share reduces nothing and has no `result`.
    """
    peers = exchange.peers
    pieces = {rank: _pieces(share) for rank, share in shares.items()}
    own, reduced = pieces.get(exchange.rank, ()), _pieces(result) if result is not None else ()
    room = {peer: [torch.empty_like(piece) for piece in own[:AHEAD]] for peer in peers}

    def expect(index: int) -> list[tuple[asyncio.Future[None], Tensor]]:
        others = [room[peer][index % AHEAD][: own[index].numel()] for peer in peers]
        return [(exchange.receive(peer, other), other) for peer, other in zip(peers, others, strict=True)]

    arrivals = deque(expect(index) for index in range(min(AHEAD, len(own))))
    departures = [exchange.send(peer, piece) for peer in peers for piece in pieces.get(peer, ())]
    results: list[asyncio.Future[None]] = []
    if exchange.rank in receivers:
        # The result overwrites the share that was sent. This is safe: the reducing member has received the chunk before it sends a result.
        results = [exchange.receive(peer, piece, RESULT) for peer in peers for piece in pieces.get(peer, ())]
    for index, piece in enumerate(reduced):
        left = own[index]
        for arrival, other in arrivals.popleft():
            await arrival
            with torch.inference_mode():
                _combine(left, other, piece, op)
            left = piece
        with torch.inference_mode():
            if left is not piece:  # there are no peers
                piece.copy_(left)
            _average(piece, op, exchange.size)
        departures += [exchange.send(peer, piece, RESULT) for peer in peers if peer in receivers]
        if index + AHEAD < len(own):
            arrivals.append(expect(index + AHEAD))
    await all_carried(departures)
    await all_carried(results)


def _pieces(share: Tensor) -> tuple[Tensor, ...]:
    return torch.split(share, max(1, PIECE_BYTES // share.element_size()))


def _combine(left: Tensor, right: Tensor, out: Tensor, op: str) -> None:
    for one, other, result in _serial(left, right, out):
        COMBINE[op](one, other, out=result)


def _average(data: Tensor, op: str, size: int) -> None:
    if op == "AVG":
        for (part,) in _serial(data):
            part.div_(size)


def _serial(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split the tensors into slices of at most `SERIAL` elements, which torch processes on the calling thread."""
    return zip(*(torch.split(tensor, SERIAL) for tensor in tensors), strict=True)
