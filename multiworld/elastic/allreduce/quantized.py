"""All-reduce of one flat tensor with quantised transfers.

Each member reduces one chunk of the tensor. All members send it their quantised operands. It combines them in rank order, with its
own operand unquantised, quantises the result and sends it to all members. It uses the quantised result itself too, so all members get
the same bits. Every operand and every result is quantised once, independently of the number of members. On a ring, each member would
quantise again and the errors would add up.

Let e(i) be the error bound of quantising the operand of member i, e that of the result (see quantization.py), and n the number of
members. The result differs from the unquantised one by at most Σ e(i) + e for SUM, Σ e(i) / n + e for AVG, and max e(i) + e for MIN and
MAX.
"""

import itertools

import torch
from torch import Tensor

from multiworld.elastic.allreduce.channel import Epoch, Post, Traffic
from multiworld.elastic.allreduce.quantization import Quantization, dequantise, quantise, wire_bytes
from multiworld.elastic.allreduce.reduction import Reduction, copy


async def quantised_all_reduce(
    epoch: Epoch,
    operand: Tensor,
    result: Tensor,
    reduction: Reduction,
    quantization: Quantization,
    tag: int,
    traffic: Traffic,
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
        await _exchange(post, operand, result, reduction, quantization)


async def _exchange(
    post: Post, operand: Tensor, result: Tensor, reduction: Reduction, quantization: Quantization
) -> None:
    epoch = post.epoch
    dtype, others = operand.dtype, [rank for rank in range(epoch.size) if rank != epoch.rank]
    operands, results = _pieces(operand, epoch.size), _pieces(result, epoch.size)
    mine = operands[epoch.rank].numel()

    parts = {rank: _wire(mine, dtype, quantization) for rank in others if mine}
    arriving = {rank: post.expect(part, rank) for rank, part in parts.items()}
    finished = {rank: _wire(results[rank].numel(), dtype, quantization) for rank in others if results[rank].numel()}
    returning = {rank: post.expect(wire, rank) for rank, wire in finished.items()}
    for rank in finished:
        post.send(quantise(operands[rank], quantization), rank)
    for rank, receiving in arriving.items():
        await post.arrived(receiving, parts[rank])
    if mine:
        wire = quantise(_combined(operands[epoch.rank], parts, epoch, reduction, quantization), quantization)
        for rank in others:
            post.send(wire, rank)
        copy(results[epoch.rank], dequantise(wire, mine, dtype, quantization))
    for rank, receiving in returning.items():
        await post.arrived(receiving, finished[rank])
        copy(results[rank], dequantise(finished[rank], results[rank].numel(), dtype, quantization))
    await post.sent()


def _combined(
    own: Tensor, parts: dict[int, Tensor], epoch: Epoch, reduction: Reduction, quantization: Quantization
) -> Tensor:
    total: Tensor | None = None
    for rank in range(epoch.size):
        part = own if rank == epoch.rank else dequantise(parts[rank], own.numel(), own.dtype, quantization)
        if total is None:
            total = part.clone()
        else:
            reduction.combine(total, part, out=total)
    assert total is not None
    reduction.finish(total, epoch.size)
    return total


def _pieces(tensor: Tensor, size: int) -> list[Tensor]:
    count = tensor.numel()
    bounds = [piece * count // size for piece in range(size + 1)]
    return [tensor[begin:end] for begin, end in itertools.pairwise(bounds)]


def _wire(count: int, dtype: torch.dtype, quantization: Quantization) -> Tensor:
    return torch.empty(wire_bytes(count, dtype, quantization), dtype=torch.uint8)
