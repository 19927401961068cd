"""Reductions over the connections of a world: all-reduce, reduce and reduce-scatter.

Long tensors use a two-shot algorithm: each member reduces one share of the tensor and sends the result to the members that need it. Each
member sends as many bytes as in a ring all-reduce (2 · (n - 1) / n times the tensor), but in two steps instead of 2 · (n - 1), because
every member has a connection to every other. Shares are split into chunks, so that one chunk is reduced while others are transferred.
Short tensors use a one-shot algorithm: every member sends the whole tensor to every other. All members get bitwise equal results, because
each element is reduced either by one member or by all in rank order.

An elastic world can convert what is transferred (multiworld/collectives/quantization.py). Each member then uses the values that the
others decode, also of its own operands and results, so the results are bitwise equal. Each operand and each result is converted once, so
the error does not grow with the number of steps.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from multiworld.collectives.channel import OPERAND, RESULT, CollectiveChannel
from multiworld.collectives.quantization import decode, encode, encoded_bytes
from multiworld.collectives.transfers import copy_overlapping, wait_all

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
"""The torch function that combines two operands, by name of the `ReduceOp`. It supports `out`."""

ONE_SHOT_BYTES = 1 << 18
"""Maximum total bytes that a member sends in the one-shot algorithm."""
SLICE_ELEMENTS = 1 << 15
"""Maximum elements per call of torch. Larger calls use torch's thread pool, and the pools of members on one machine compete for cores."""
CHUNK_BYTES = 1 << 22
"""Size of a chunk in bytes. Reducing one chunk blocks the event loop for about half a millisecond."""
CHUNK_BUFFERS = 2
"""Number of buffers for operands of all peers, one chunk each. They are reused, so that they stay in the CPU cache."""


async def all_reduce(
    channel: CollectiveChannel, data: Tensor, result: Tensor, op: str, wire_format: str | None = None
) -> None:
    """Reduce `data` of all members into the `result` of all members.

    Args:
        data: [n], contiguous, on the host, same length and dtype at all members. It is not changed, unless it is also the result.
        result: `data`, or a tensor like it in other memory. With `wire_format`, it must be in other memory.
        op: the name of a `ReduceOp`, such as "SUM"; AVG divides by the number of members, integers rounded towards zero.
        wire_format: of multiworld/collectives/quantization.py, for floating dtypes; None transfers the dtype of `data` and reduces in it.
    Raises:
        RuntimeError: a connection is lost; the content of `result` is undefined.
        WorldError: the world has ended.
    """
    if wire_format is not None:
        await _all_reduce_converted(channel, data, result, op, wire_format)
    elif data.nbytes * len(channel.peers) <= ONE_SHOT_BYTES:
        await _one_shot(channel, data, result, op)
    else:
        shares, results = (dict(enumerate(torch.tensor_split(each, channel.size))) for each in (data, result))
        await _two_shot(channel, shares, results, op, range(channel.size))


async def reduce(channel: CollectiveChannel, data: Tensor, dst: int, op: str) -> None:
    """Reduce `data` in place at rank `dst`; its content at other ranks is undefined. Otherwise like `all_reduce`."""
    if channel.size <= 2 or data.nbytes * len(channel.peers) <= ONE_SHOT_BYTES:
        shares = {dst: data}
    else:
        shares = dict(enumerate(torch.tensor_split(data, channel.size)))
    await _two_shot(channel, shares, shares, op, (dst,))


async def reduce_scatter(channel: CollectiveChannel, shares: Sequence[Tensor], result: Tensor, op: str) -> None:
    """Reduce `shares[r]` of all members into `result` at rank r, for every r. The shares are not changed.

    Shares and result are like those of `all_reduce`, but may overlap; errors as in `all_reduce`.
    """
    sent = copy_overlapping(dict(enumerate(shares)), {channel.rank: result}, channel.rank)
    await _two_shot(channel, sent, {channel.rank: result}, op, ())


async def _one_shot(channel: CollectiveChannel, data: Tensor, result: Tensor, op: str) -> None:
    """One-shot all-reduce: send the whole tensor to every peer and reduce all operands in rank order."""
    others = {peer: torch.empty_like(data) for peer in channel.peers}
    receives = [channel.receive(peer, other) for peer, other in others.items()]
    sends = [channel.send(peer, data) for peer in channel.peers]
    await wait_all(receives)
    await wait_all(sends)  # `data` must not change while it is being sent
    total, *rest = (others.get(rank, data) for rank in range(channel.size))
    with torch.inference_mode():
        for operand in rest:
            target = operand if total is data else total
            _combine(total, operand, target, op)
            total = target
        for part, target in _slices(total, result):
            target.copy_(part)
        _average(result, op, channel.size)


async def _two_shot(
    channel: CollectiveChannel,
    shares: Mapping[int, Tensor],
    results: Mapping[int, Tensor],
    op: str,
    receivers: Sequence[int],
) -> None:
    """Two-shot reduction: reduce the share of this rank into its result, and send that to `receivers`, into their `results`.

    Args:
        shares: by the rank that reduces the share; a rank without a share reduces nothing.
        results: by the rank that reduces them; may be in the memory of the shares.
    """
    peers = channel.peers
    chunks = {rank: _chunks(share) for rank, share in shares.items()}
    own = chunks.get(channel.rank, ())
    reduced = _chunks(results[channel.rank]) if channel.rank in results else ()
    operands = [(peer, chunk) for chunk in own for peer in peers]
    buffers = [torch.empty_like(own[0]) for _ in operands[:CHUNK_BUFFERS]]

    def start_receive(number: int) -> tuple[asyncio.Future[None], Tensor]:
        peer, chunk = operands[number]
        buffer = buffers[number % len(buffers)][: chunk.numel()]
        return channel.receive(peer, buffer), buffer

    receives = deque(start_receive(number) for number in range(len(buffers)))
    started = len(receives)
    sends = [channel.send(peer, chunk) for peer in peers for chunk in chunks.get(peer, ())]
    receiving: list[asyncio.Future[None]] = []
    if channel.rank in receivers:
        # A result may overwrite the share that was sent. This is safe: the reducing member has received the chunk before it sends a result.
        receiving = [
            channel.receive(peer, chunk, RESULT)
            for peer in peers
            if peer in results
            for chunk in _chunks(results[peer])
        ]
    for index, chunk in enumerate(reduced):
        left = own[index]
        for _ in peers:
            future, other = receives.popleft()
            await future
            with torch.inference_mode():
                _combine(left, other, chunk, op)
            left = chunk
            if started < len(operands):
                receives.append(start_receive(started))
                started += 1
        with torch.inference_mode():
            if left is not chunk:  # there are no peers
                chunk.copy_(left)
            _average(chunk, op, channel.size)
        sends += [channel.send(peer, chunk, RESULT) for peer in peers if peer in receivers]
    await wait_all(sends)
    await wait_all(receiving)


async def _all_reduce_converted(
    channel: CollectiveChannel, data: Tensor, result: Tensor, op: str, wire_format: str
) -> None:
    """All-reduce with encoded transfers. In the one-shot algorithm, all members own the only share."""
    peers, rank = channel.peers, channel.rank
    one_shot = encoded_bytes(data.numel(), wire_format) * len(peers) <= ONE_SHOT_BYTES
    shares, results = (torch.tensor_split(each, 1 if one_shot else channel.size) for each in (data, result))
    owned = rank % len(shares)

    def receive(peer: int, share: Tensor, kind: int) -> list[tuple[asyncio.Future[None], Tensor]]:
        sizes = [encoded_bytes(chunk.numel(), wire_format) for chunk in _chunks(share)]
        buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        return [(channel.receive(peer, buffer, kind), buffer) for buffer in buffers]

    receives = {peer: receive(peer, shares[owned], OPERAND) for peer in peers}
    receiving = {} if one_shot else {peer: receive(peer, results[peer], RESULT) for peer in peers}
    encoded: dict[int, list[Tensor]] = {}
    sends: list[asyncio.Future[None]] = []
    for index in dict.fromkeys(peer % len(shares) for peer in (*peers, rank)):
        encoded[index] = []
        for chunk in _chunks(shares[index]):
            encoded[index].append(encode(chunk, wire_format))
            sends += [channel.send(peer, encoded[index][-1]) for peer in peers if peer % len(shares) == index]
            await asyncio.sleep(0)
    for index, chunk in enumerate(_chunks(results[owned])):
        for peer in peers:
            await receives[peer][index][0]
        with torch.inference_mode():
            wires = [
                receives[each][index][1] if each != rank else encoded[owned][index] for each in range(channel.size)
            ]
            total, *rest = (decode(wire, chunk.numel(), chunk.dtype, wire_format) for wire in wires)
            for operand in rest:
                _combine(total, operand, total, op)
            _average(total, op, channel.size)
            if not one_shot:
                wire = encode(total, wire_format)
                sends += [channel.send(peer, wire, RESULT) for peer in peers]
                total = decode(wire, chunk.numel(), chunk.dtype, wire_format)
            chunk.copy_(total)
        await asyncio.sleep(0)
    for peer, parts in receiving.items():
        for (received, wire), chunk in zip(parts, _chunks(results[peer]), strict=True):
            await received
            with torch.inference_mode():
                chunk.copy_(decode(wire, chunk.numel(), chunk.dtype, wire_format))
    await wait_all(sends)


def _chunks(share: Tensor) -> tuple[Tensor, ...]:
    return torch.split(share, max(1, CHUNK_BYTES // share.element_size()))


def _combine(left: Tensor, right: Tensor, out: Tensor, op: str) -> None:
    for one, other, result in _slices(left, right, out):
        _COMBINE[op](one, other, out=result)


def _average(data: Tensor, op: str, size: int) -> None:
    if op == "AVG":
        for (part,) in _slices(data):
            part.div_(size, rounding_mode=None if part.is_floating_point() else "trunc")


def _slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split the tensors into slices that torch processes on the calling thread: of at most `SLICE_ELEMENTS` elements if it has others."""
    size = SLICE_ELEMENTS if torch.get_num_threads() > 1 else max(1, tensors[0].numel())
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
