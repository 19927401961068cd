"""All-reduce of one flat tensor that travels quantised.

Each member is in charge of one piece of the tensor. All send it their part of that piece, quantised; it combines them in the order of the
ranks, with its own part as it is, quantises the result and gives that to all, itself included: so all have the same bits. Every operand
and every result is quantised once, however many members there are; around a ring it would be once a member, with the errors adding up.

With e(i) the bound of quantising the operand of member i and e the bound of quantising the result (multiworld/elastic/quantise.py), and n
members, the result of SUM differs from that without quantisation by at most Σ e(i) + e, of AVG by Σ e(i) / n + e, of MIN and MAX by
max e(i) + e.
"""

import itertools

import torch
from torch import Tensor

from multiworld.elastic.epoch import Epoch, Post, Traffic
from multiworld.elastic.quantise import Quantization, dequantise, quantise, wire_bytes
from multiworld.elastic.reduction import Reduction, copy


async def quantised_all_reduce(
    epoch: Epoch,
    operand: Tensor,
    result: Tensor,
    reduction: Reduction,
    quantization: Quantization,
    tag: int,
    traffic: Traffic,
) -> None:
    """Reduce everybody's `operand` into everybody's `result`: flat, contiguous, on the host, different memory.

    Raises BrokenWorldException. What `result` holds then is undefined; `operand` is as it was.
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
