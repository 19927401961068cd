"""Collectives that move data, over the connections of a world.

Every member has a connection to every other, so data is sent directly to the member that needs it. A long broadcast uses a binomial tree
and chunks, so that the root does not send the whole tensor to every other member.
"""

import asyncio
from collections.abc import Mapping

import torch
from torch import Tensor

from multiworld.collectives.channel import CollectiveChannel
from multiworld.ops.buffers import byte_view

DIRECT_BYTES = 1 << 18
"""A broadcast for which the root would send at most this many bytes in total is sent directly to each member."""
CHUNK_BYTES = 1 << 21
"""Size in bytes of a chunk that a member forwards, and of a local copy before the event loop runs again."""


async def exchange(channel: CollectiveChannel, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
    """Send `sent[r]` to each rank r, and receive into `received[r]` from each rank r. Empty tensors are sent, too.

    Args:
        sent, received: uint8 [n], contiguous, on the host, by rank. The entry of this rank is copied locally.
    Raises:
        RuntimeError: a connection is lost.
        WorldError: the world has ended.
    """
    own = channel.rank
    sent = copy_overlapping(sent, received, own)
    futures = [channel.receive(peer, received[peer]) for peer in channel.peers if peer in received]
    futures += [channel.send(peer, sent[peer]) for peer in channel.peers if peer in sent]
    if own in sent and own in received:
        await _copy(received[own], sent[own])
    await wait_all(futures)


async def broadcast(channel: CollectiveChannel, data: Tensor, src: int) -> None:
    """Send `data` of rank `src` to all other members, into their `data`.

    `data` is uint8 [n], contiguous, on the host, with the same n at all members. Errors as in `exchange`.
    """
    direct = data.nbytes * len(channel.peers) <= DIRECT_BYTES
    parent, children = _star(channel, src) if direct else _tree(channel, src)
    chunks = torch.split(data, CHUNK_BYTES)
    receives = [channel.receive(parent, chunk) for chunk in chunks] if parent is not None else []
    sends: list[asyncio.Future[None]] = []
    for index, chunk in enumerate(chunks):
        if receives:
            await receives[index]
        sends += [channel.send(child, chunk) for child in children]
    await wait_all(sends)


def _star(channel: CollectiveChannel, src: int) -> tuple[int | None, list[int]]:
    """Parent (None at the root) and children of this rank for a direct broadcast."""
    return (None, list(channel.peers)) if channel.rank == src else (src, [])


def _tree(channel: CollectiveChannel, src: int) -> tuple[int | None, list[int]]:
    """Parent and children in a binomial tree. Ranks are counted from the root; clearing the lowest set bit of a number gives its parent."""
    number = (channel.rank - src) % channel.size
    lowest_bit = number & -number or 1 << (channel.size - 1).bit_length()
    children = [
        number + (lowest_bit >> step) for step in range(1, lowest_bit.bit_length())
    ]  # the largest subtree first
    parent = None if number == 0 else ((number & number - 1) + src) % channel.size
    return parent, [(child + src) % channel.size for child in children if child < channel.size]


async def wait_all(futures: list[asyncio.Future[None]]) -> None:
    """Wait for all futures."""
    for future in futures:
        await future


def copy_overlapping(sent: Mapping[int, Tensor], received: Mapping[int, Tensor], own: int) -> Mapping[int, Tensor]:
    """`sent`, with copies of tensors that share memory with a received tensor, because callers may pass overlapping tensors.

    The tensor of rank `own` is not copied if it is exactly the received one.
    """
    targets = [each for rank, each in received.items() if rank != own or own not in sent or not _same(sent[own], each)]
    return {
        rank: data.clone() if any(_overlap(data, each) for each in targets) else data for rank, data in sent.items()
    }


def _same(left: Tensor, right: Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.nbytes == right.nbytes


def _overlap(left: Tensor, right: Tensor) -> bool:
    left_start, right_start = left.data_ptr(), right.data_ptr()
    return left_start < right_start + right.nbytes and right_start < left_start + left.nbytes


async def _copy(target: Tensor, source: Tensor) -> None:
    if _same(target, source):
        return
    # Not torch's copy: it would use its thread pool, and the pools of members on one machine compete for cores.
    to, data = byte_view(target), byte_view(source)
    for at in range(0, len(to), CHUNK_BYTES):
        to[at : at + CHUNK_BYTES] = data[at : at + CHUNK_BYTES]
        await asyncio.sleep(0)
