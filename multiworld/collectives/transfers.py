"""The exchange of tensors over the connections of a world, which all collectives that move data use.

Every member has a connection to every other, so data is sent directly to the member that needs it.
"""

import asyncio
from collections.abc import Mapping

from torch import Tensor

from multiworld.collectives.channel import CollectiveChannel
from multiworld.ops.buffers import byte_view

_CHUNK_BYTES = 1 << 21
"""Size in bytes of a local copy before the event loop runs again."""


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
    for at in range(0, len(to), _CHUNK_BYTES):
        to[at : at + _CHUNK_BYTES] = data[at : at + _CHUNK_BYTES]
        await asyncio.sleep(0)
