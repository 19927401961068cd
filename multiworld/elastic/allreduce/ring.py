"""All-reduce of one flat tensor: in chunks around a ring of the members, or with the world's all-reduce.

The tensor is split into one piece per member. In the first half of the steps each piece passes around the ring once, and every member
adds its operand. In the second half the reduced pieces pass around. A piece is sent in chunks: a member forwards a chunk as soon as it is
combined, while the next one arrives, so all connections are used in both directions. One member completes each piece and the others copy
it, so all members get the same bits.

The operand is only read. Chunks are combined in the memory of the result.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from multiworld.elastic.allreduce.channel import Epoch, Post, Traffic
from multiworld.elastic.allreduce.reduction import Reduction, copy
from multiworld.ops.operation import Operation

CHUNK_BYTES = 1 << 22
"""Bytes per chunk. Smaller chunks overlap better but cost more, because each chunk is one transfer."""
_AHEAD = 32
"""Number of receives posted ahead. They need no additional memory, and a sender does not wait for a busy receiver."""
RING_FROM_BYTES = {2: 1 << 20, 3: 1 << 20, 4: 1 << 22}
"""Smallest tensor in bytes that uses the ring, by number of members; with other numbers of members the ring is not used. The measurements
are in docs/decisions/0013-elastic-worlds.md; `python -m benchmarks.elastic algorithms` repeats them.
"""


def prefers_ring(size_bytes: int, members: int) -> bool:
    """Return whether a tensor of `size_bytes` uses the ring."""
    return members in RING_FROM_BYTES and size_bytes >= RING_FROM_BYTES[members]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of the tensor that is received from the left neighbour.

    Attributes:
        place: the part of the result that receives it.
        own: the same part of this member's operand, to be combined with it; None for a reduced chunk.
        last: whether this member's operand is the last one, which completes the chunk.
        passed_on: whether the right neighbour needs it.
    """

    place: Tensor
    own: Tensor | None
    last: bool
    passed_on: bool


async def ring_all_reduce(
    epoch: Epoch, operand: Tensor, result: Tensor, reduction: Reduction, tag: int, traffic: Traffic
) -> None:
    """Reduce the `operand` of all members into the `result` of all members.

    Args:
        operand, result: flat, contiguous, on the host, in different memory; same dtype and size on all members.
        tag: identifies the all-reduce; the same on all members.
        traffic: the bytes sent and received are added to it, also on failure.
    Raises:
        BrokenWorldException: the epoch is over. `result` is undefined, `operand` is unchanged.
    """
    with Post(epoch, tag, traffic) as post:
        await _go_around(post, operand, result, reduction)


async def _go_around(post: Post, operand: Tensor, result: Tensor, reduction: Reduction) -> None:
    epoch = post.epoch
    left, right = (epoch.rank - 1) % epoch.size, (epoch.rank + 1) % epoch.size
    for own in _chunks(operand, epoch.rank, epoch.size):
        post.send(own, right)
    coming = _coming(operand, result, epoch.rank, epoch.size)
    expected: deque[tuple[_Chunk, Operation]] = deque()
    while True:
        while len(expected) < _AHEAD and (chunk := next(coming, None)) is not None:
            expected.append((chunk, post.expect(chunk.place, left)))
        if not expected:
            break
        chunk, receiving = expected.popleft()
        await post.arrived(receiving, chunk.place)
        if chunk.own is not None:
            reduction.combine(chunk.place, chunk.own, out=chunk.place)
        if chunk.last:
            reduction.finish(chunk.place, epoch.size)
        if chunk.passed_on:
            post.send(chunk.place, right)
    await post.sent()


def _coming(operand: Tensor, result: Tensor, rank: int, size: int) -> Iterator[_Chunk]:
    """Yield the chunks that arrive from the left neighbour, in order."""
    for turn in range(2 * (size - 1)):
        piece = (rank - 1 - turn) % size
        adding = turn < size - 1
        places = _chunks(result, piece, size)
        owns = _chunks(operand, piece, size) if adding else [None] * len(places)
        for place, own in zip(places, owns, strict=True):
            yield _Chunk(place, own, last=turn == size - 2, passed_on=turn < 2 * (size - 1) - 1)


def _chunks(tensor: Tensor, piece: int, size: int) -> list[Tensor]:
    """Return one of `size` pieces of a flat tensor, in chunks. The sizes of the pieces differ by at most one element."""
    count = tensor.numel()
    begin, end = piece * count // size, (piece + 1) * count // size
    step = CHUNK_BYTES // tensor.element_size()
    return [tensor[at : min(at + step, end)] for at in range(begin, end, step)]


async def direct_all_reduce(
    epoch: Epoch, operand: Tensor, result: Tensor, reduction: Reduction, traffic: Traffic
) -> None:
    """Like `ring_all_reduce`, with the world's all-reduce. All members must start several of them in the same order.

    `operand` and `result` may be the same memory. On failure `result` is undefined. `traffic` is an estimate, added on success: the bytes
    of a ring. Short tensors, which go to all members as a whole, can take more.
    """
    if result.data_ptr() != operand.data_ptr():
        copy(result, operand)
    await epoch.all_reduce(result, reduction.op)
    reduction.finish(result, epoch.size)
    moved = 2 * (epoch.size - 1) * result.nbytes // epoch.size
    traffic.add(Traffic(moved, moved))
