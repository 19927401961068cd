"""Collectives that move data, over the connections of a world.

Every member has a connection to every other, so data is sent directly to the member that needs it. A long broadcast uses a binomial tree
and chunks, so that the root does not send the whole tensor to every other member.
"""

import asyncio
from collections.abc import Mapping

import torch
from torch import Tensor

from multiworld.collectives.channel import CollectiveChannel
from multiworld.transport.connection import memory_of

FLAT_BYTES = 1 << 18
"""A broadcast for which the root would send at most this many bytes in total is sent directly to each member."""
PIECE_BYTES = 1 << 21
"""Size in bytes of a chunk that a member forwards, and of a local copy before the event loop runs again."""


async def transfer(exchange: CollectiveChannel, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
    """Send `sent[r]` to each rank r, and receive into `received[r]` from each rank r. Empty tensors are sent, too.

    Args:
        sent, received: uint8 [n], contiguous, on the host, by rank. The entry of this rank is copied locally.
    Raises:
        RuntimeError: a connection is lost.
        WorldError: the world has ended.
    """
    own = exchange.rank
    sent = apart(sent, received, own)
    under_way = [exchange.receive(peer, received[peer]) for peer in exchange.peers if peer in received]
    under_way += [exchange.send(peer, sent[peer]) for peer in exchange.peers if peer in sent]
    if own in sent and own in received:
        await _copy(received[own], sent[own])
    await all_carried(under_way)


async def broadcast(exchange: CollectiveChannel, data: Tensor, src: int) -> None:
    """Send `data` of rank `src` to all other members, into their `data`.

    `data` is uint8 [n], contiguous, on the host, with the same n at all members. Errors as in `transfer`.
    """
    flat = data.nbytes * len(exchange.peers) <= FLAT_BYTES
    parent, children = _star(exchange, src) if flat else _tree(exchange, src)
    pieces = torch.split(data, PIECE_BYTES)
    arrivals = [exchange.receive(parent, piece) for piece in pieces] if parent is not None else []
    departures: list[asyncio.Future[None]] = []
    for index, piece in enumerate(pieces):
        if arrivals:
            await arrivals[index]
        departures += [exchange.send(child, piece) for child in children]
    await all_carried(departures)


def _star(exchange: CollectiveChannel, src: int) -> tuple[int | None, list[int]]:
    """Parent (None at the root) and children of this rank for a direct broadcast."""
    return (None, list(exchange.peers)) if exchange.rank == src else (src, [])


def _tree(exchange: CollectiveChannel, src: int) -> tuple[int | None, list[int]]:
    """Parent and children in a binomial tree. Ranks are counted from the root; clearing the lowest set bit of a number gives its parent."""
    number = (exchange.rank - src) % exchange.size
    below = number & -number or 1 << (exchange.size - 1).bit_length()
    children = [number + (below >> step) for step in range(1, below.bit_length())]  # the largest subtree first
    parent = None if number == 0 else ((number & number - 1) + src) % exchange.size
    return parent, [(child + src) % exchange.size for child in children if child < exchange.size]


async def all_carried(futures: list[asyncio.Future[None]]) -> None:
    """Wait for all futures."""
    for future in futures:
        await future


def apart(sent: Mapping[int, Tensor], received: Mapping[int, Tensor], own: int) -> Mapping[int, Tensor]:
    """`sent`, with copies of tensors that share memory with a received tensor, because callers may pass overlapping tensors.

    The tensor of this rank is not copied if it is exactly the received one.
    """
    targets = [room for rank, room in received.items() if rank != own or own not in sent or not _same(sent[own], room)]
    return {
        rank: data.clone() if any(_overlap(data, room) for room in targets) else data for rank, data in sent.items()
    }


def _same(left: Tensor, right: Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.nbytes == right.nbytes


def _overlap(left: Tensor, right: Tensor) -> bool:
    begin, other = left.data_ptr(), right.data_ptr()
    return begin < other + right.nbytes and other < begin + left.nbytes


async def _copy(target: Tensor, source: Tensor) -> None:
    if _same(target, source):
        return
    into, out_of = (
        memory_of(target),
        memory_of(source),
    )  # torch's copy would use its thread pool, and the pools of members on one machine compete for cores
    for at in range(0, len(into), PIECE_BYTES):
        into[at : at + PIECE_BYTES] = out_of[at : at + PIECE_BYTES]
        await asyncio.sleep(0)
