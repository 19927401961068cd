"""All-reduce of one flat tensor: around the ring of an epoch's members in chunks, or by Gloo, whichever was measured to be faster.

The ring: the tensor is cut into as many pieces as there are members. In the first half of the turns each piece goes around once and
every member adds its own part to it; in the second half the finished pieces go around. Each piece is cut into chunks, and a chunk is
passed on as soon as it is combined, while the next one arrives: so all connections are busy all the time, in both directions. Each piece
is finished by one member, and the others get a copy of what it has: the result is the same at all, bit for bit.

The operand is only read; what arrives is combined where the result will be.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from multiworld.elastic.epoch import Epoch, Post, Traffic
from multiworld.elastic.reduction import Reduction, copy
from multiworld.operation import Operation

CHUNK_BYTES = 1 << 22
"""How much is passed on at once. Smaller chunks overlap better and cost more: each is a message of its own."""
_AHEAD = 32
"""How many chunks are waited for at once. They need no memory of their own, and who sends is never held up by a receiver that is busy."""
RING_FROM_BYTES = {2: 1 << 20, 3: 1 << 20, 4: 1 << 22}
"""From which size on the ring beats Gloo's own all-reduce, by number of members; with others it is Gloo's. How that was measured is in
docs/decisions/0013-elastic-worlds.md; `python -m benchmarks.elastic algorithms` measures again."""


def prefers_ring(size_bytes: int, members: int) -> bool:
    """Whether a tensor of that size goes around the ring rather than through Gloo."""
    return members in RING_FROM_BYTES and size_bytes >= RING_FROM_BYTES[members]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of the tensor that arrives in one turn.

    Attributes:
        own: our part of it, which is to be added; None once it is finished.
        last: whether it is finished by us adding ours.
        passed_on: whether the next member needs it.
    """

    place: Tensor
    own: Tensor | None
    last: bool
    passed_on: bool


async def ring_all_reduce(
    epoch: Epoch, operand: Tensor, result: Tensor, reduction: Reduction, tag: int, traffic: Traffic
) -> None:
    """Reduce everybody's `operand` into everybody's `result`.

    Args:
        operand, result: flat, contiguous, on the host, of the same dtype and size, the same at all members; different memory.
        traffic: what goes over the wire is added to it, also when it fails.
    Raises BrokenWorldException. What `result` holds then is undefined; `operand` is as it was.
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
    """What arrives from the left, in order."""
    for turn in range(2 * (size - 1)):
        piece = (rank - 1 - turn) % size
        adding = turn < size - 1
        places = _chunks(result, piece, size)
        owns = _chunks(operand, piece, size) if adding else [None] * len(places)
        for place, own in zip(places, owns, strict=True):
            yield _Chunk(place, own, last=turn == size - 2, passed_on=turn < 2 * (size - 1) - 1)


def _chunks(tensor: Tensor, piece: int, size: int) -> list[Tensor]:
    """One of `size` pieces of a flat tensor, in chunks. Pieces differ by one element at the most."""
    count = tensor.numel()
    begin, end = piece * count // size, (piece + 1) * count // size
    step = CHUNK_BYTES // tensor.element_size()
    return [tensor[at : min(at + step, end)] for at in range(begin, end, step)]


async def gloo_all_reduce(
    epoch: Epoch, operand: Tensor, result: Tensor, reduction: Reduction, traffic: Traffic
) -> None:
    """The same through Gloo. Who posts several must do so in the same order as all others.

    What Gloo sends is not told by it; it is counted as that of a ring, which its all-reduce is.
    """
    if result.data_ptr() != operand.data_ptr():
        copy(result, operand)
    await epoch.all_reduce(result, reduction.on_gloo)
    reduction.finish(result, epoch.size)
    moved = 2 * (epoch.size - 1) * result.nbytes // epoch.size
    traffic.add(Traffic(moved, moved))
