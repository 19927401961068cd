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

from multiworld.elastic.allreduce.channel import ByteCounters, TaggedChannel, ViewWorld
from multiworld.elastic.allreduce.reduction import Reduction
from multiworld.ops.operation import Operation

CHUNK_BYTES = 1 << 22
"""Bytes per chunk. Smaller chunks overlap better but cost more, because each chunk is one transfer."""
_RECVS_AHEAD = 32
"""Number of receives posted ahead. They need no additional memory, and a sender does not wait for a busy receiver."""
RING_MIN_BYTES = {2: 1 << 20, 3: 1 << 20, 4: 1 << 22}
"""Smallest tensor in bytes that uses the ring, by number of members; with other numbers of members the ring is not used. The measurements
are in docs/decisions/0013-elastic-worlds.md.
"""


def prefers_ring(size_bytes: int, members: int) -> bool:
    """Return whether a tensor of `size_bytes` uses the ring."""
    return members in RING_MIN_BYTES and size_bytes >= RING_MIN_BYTES[members]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of the tensor that is received from the left neighbour.

    Attributes:
        target: the part of the result that receives it.
        own: the same part of this member's operand, to be combined with it; None for a reduced chunk.
        last: whether this member's operand is the last one, which completes the chunk.
        forward: whether the right neighbour needs it.
    """

    target: Tensor
    own: Tensor | None
    last: bool
    forward: bool


async def ring_all_reduce(channel: TaggedChannel, operand: Tensor, result: Tensor, reduction: Reduction) -> None:
    """Reduce the `operand` of all members into the `result` of all members, in chunks around a ring.

    Args:
        operand, result: flat, contiguous, on the host, in different memory; same dtype and size on all members.
    Raises:
        BrokenWorldException: the view has ended. `result` is undefined, `operand` is unchanged.
    """
    world = channel.world
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    for own in _chunks(operand, world.rank, world.size):
        channel.send(own, right)
    chunks = _chunks_from_left(operand, result, world.rank, world.size)
    pending: deque[tuple[_Chunk, Operation]] = deque()
    while True:
        while len(pending) < _RECVS_AHEAD and (chunk := next(chunks, None)) is not None:
            pending.append((chunk, channel.recv(chunk.target, left)))
        if not pending:
            break
        chunk, receiving = pending.popleft()
        await channel.wait_received(receiving, chunk.target)
        if chunk.own is not None:
            reduction.combine(chunk.target, chunk.own, out=chunk.target)
        if chunk.last:
            reduction.finish(chunk.target, world.size)
        if chunk.forward:
            channel.send(chunk.target, right)
    await channel.wait_sent()


def _chunks_from_left(operand: Tensor, result: Tensor, rank: int, size: int) -> Iterator[_Chunk]:
    """Yield the chunks that arrive from the left neighbour, in order."""
    for step in range(2 * (size - 1)):
        piece = (rank - 1 - step) % size
        adding = step < size - 1
        targets = _chunks(result, piece, size)
        owns = _chunks(operand, piece, size) if adding else [None] * len(targets)
        for target, own in zip(targets, owns, strict=True):
            yield _Chunk(target, own, last=step == size - 2, forward=step < 2 * (size - 1) - 1)


def _chunks(tensor: Tensor, piece: int, size: int) -> list[Tensor]:
    """Return one of `size` pieces of a flat tensor, in chunks. The sizes of the pieces differ by at most one element."""
    count = tensor.numel()
    begin, end = piece * count // size, (piece + 1) * count // size
    length = CHUNK_BYTES // tensor.element_size()
    return [tensor[at : min(at + length, end)] for at in range(begin, end, length)]


async def direct_all_reduce(world: ViewWorld, tensor: Tensor, reduction: Reduction, counters: ByteCounters) -> None:
    """Reduce `tensor` in place with the world's all-reduce. All members must start several of them in the same order.

    On failure `tensor` is undefined. On success `counters` gets an estimate: the bytes of a ring. Short tensors, which every member sends
    as a whole to all others, can take more.
    """
    await world.all_reduce(tensor, reduction.op)
    reduction.finish(tensor, world.size)
    moved = 2 * (world.size - 1) * tensor.nbytes // world.size
    counters.sent += moved
    counters.received += moved
