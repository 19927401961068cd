"""All-reduce over the lines: each member reduces its own share of the tensor, and sends the result to all.

Every byte travels as often as in a ring (2 · (n - 1) / n times the tensor for each member), but in two steps instead of 2 · (n - 1), for
every member has a line to every other. Long shares go in pieces, so that one piece is reduced while others are on their way. Short
tensors go whole to everybody, in one step. Each element is reduced by one member alone, or by all in the order of the ranks, so that
all members end with the very same bits.
"""

import asyncio
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from multiworld.exchange import Exchange

Combine = Callable[..., Tensor]
"""torch's function of two tensors with an `out`."""

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
"""How two operands become one, by the name of the `ReduceOp`."""

WHOLE_BYTES = 1 << 18
"""What a member sends at the most when it sends the whole tensor to everybody."""
SERIAL = 1 << 15
"""torch computes so many elements on the thread that asks. More would wake its others, which the members of a machine fight over."""
PIECE_BYTES = 1 << 20
"""So much is reduced at a time: the event loop stands still meanwhile, for a tenth of a millisecond or two."""


async def all_reduce(exchange: Exchange, data: Tensor, op: str) -> None:
    """Reduce `data` in place.

    Args:
        data: [n], contiguous, on the host, of the same length and dtype at all members.
        op: a key of `COMBINE`; AVG divides by the number of members.
    Raises:
        RuntimeError: a line is lost.
        WorldError: the world has ended.
    """
    if data.nbytes * len(exchange.peers) <= WHOLE_BYTES:
        await _everybody_all(exchange, data, op)
    else:
        await _each_its_share(exchange, data, op)


async def _everybody_all(exchange: Exchange, data: Tensor, op: str) -> None:
    others = {peer: torch.empty_like(data) for peer in exchange.peers}
    arrivals = [exchange.receive(peer, other) for peer, other in others.items()]
    departures = [exchange.send(peer, data) for peer in exchange.peers]
    await _all(arrivals)
    await _all(departures)  # or what is still being sent would change
    operands = others | {exchange.rank: data}
    with torch.inference_mode():
        first, *rest = (operands[rank] for rank in range(exchange.size))
        for operand in rest:
            _combine(first, operand, op)
        if first is not data:
            for part, result in _serial(data, first):
                part.copy_(result)
        _average(data, op, exchange.size)


async def _each_its_share(exchange: Exchange, data: Tensor, op: str) -> None:
    shares = torch.tensor_split(data, exchange.size)
    pieces = [_pieces(share) for share in shares]
    mine = pieces[exchange.rank]
    others = {peer: [torch.empty_like(piece) for piece in mine] for peer in exchange.peers}
    arrivals = {peer: [exchange.receive(peer, other) for other in theirs] for peer, theirs in others.items()}
    departures = [exchange.send(peer, piece) for peer in exchange.peers for piece in pieces[peer]]
    # A result overwrites what went to its member before, which has all of that, or it could not have reduced it.
    results = [exchange.receive(peer, piece) for peer in exchange.peers for piece in pieces[peer]]
    for index, piece in enumerate(mine):
        for peer in exchange.peers:
            await arrivals[peer][index]
            with torch.inference_mode():
                _combine(piece, others[peer][index], op)
        with torch.inference_mode():
            _average(piece, op, exchange.size)
        departures += [exchange.send(peer, piece) for peer in exchange.peers]
    await _all(departures)
    await _all(results)


def _pieces(share: Tensor) -> tuple[Tensor, ...]:
    return torch.split(share, max(1, PIECE_BYTES // share.element_size())) if share.numel() else ()


def _combine(data: Tensor, other: Tensor, op: str) -> None:
    for part, operand in _serial(data, other):
        COMBINE[op](part, operand, out=part)


def _average(data: Tensor, op: str, size: int) -> None:
    if op == "AVG":
        for (part,) in _serial(data):
            part.div_(size)


def _serial(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of them, each of a length with which torch computes on this thread alone."""
    return zip(*(torch.split(tensor, SERIAL) for tensor in tensors), strict=True)


async def _all(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        await future
