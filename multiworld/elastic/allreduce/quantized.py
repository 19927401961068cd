"""All-reduce of one flat tensor with quantized transfers.

Each member reduces one chunk of the tensor. All members send it their quantized operands. It combines them in rank order, with its
own operand unquantized, quantizes the result and sends it to all members. It uses the quantized result itself too, so all members get
the same bits. Every operand and every result is quantized once, independently of the number of members. On a ring, each member would
quantize again and the errors would add up.

Let e(i) be the error bound of quantizing the operand of member i, e that of the result (see quantization.py), and n the number of
members. The result differs from the unquantized one by at most Σ e(i) + e for SUM, Σ e(i) / n + e for AVG, and max e(i) + e for MIN and
MAX.
"""

import itertools

import torch
from torch import Tensor

from multiworld.elastic.allreduce.channel import TaggedChannel, ViewWorld
from multiworld.elastic.allreduce.quantization import Quantization, dequantize, quantize, wire_bytes
from multiworld.elastic.allreduce.reduction import Reduction, copy


async def quantized_all_reduce(
    channel: TaggedChannel, operand: Tensor, result: Tensor, reduction: Reduction, quantization: Quantization
) -> None:
    """Reduce the `operand` of all members into the `result` of all members, quantized.

    Args:
        operand, result: flat, contiguous, on the host, in different memory; same dtype and size on all members.
    Raises:
        BrokenWorldException: the view has ended. `result` is undefined, `operand` is unchanged.
    """
    world = channel.world
    dtype, others = operand.dtype, [rank for rank in range(world.size) if rank != world.rank]
    operands, results = _chunks(operand, world.size), _chunks(result, world.size)
    own_count = operands[world.rank].numel()

    received = {rank: _wire_buffer(own_count, dtype, quantization) for rank in others if own_count}
    receiving_operands = {rank: channel.recv(chunk, rank) for rank, chunk in received.items()}
    reduced = {
        rank: _wire_buffer(results[rank].numel(), dtype, quantization) for rank in others if results[rank].numel()
    }
    receiving_results = {rank: channel.recv(wire, rank) for rank, wire in reduced.items()}
    for rank in reduced:
        channel.send(quantize(operands[rank], quantization), rank)
    for rank, receiving in receiving_operands.items():
        await channel.wait_received(receiving, received[rank])
    if own_count:
        wire = quantize(_reduce(operands[world.rank], received, world, reduction, quantization), quantization)
        for rank in others:
            channel.send(wire, rank)
        copy(results[world.rank], dequantize(wire, own_count, dtype, quantization))
    for rank, receiving in receiving_results.items():
        await channel.wait_received(receiving, reduced[rank])
        copy(results[rank], dequantize(reduced[rank], results[rank].numel(), dtype, quantization))
    await channel.wait_sent()


def _reduce(
    own: Tensor, received: dict[int, Tensor], world: ViewWorld, reduction: Reduction, quantization: Quantization
) -> Tensor:
    def chunk(rank: int) -> Tensor:
        return own if rank == world.rank else dequantize(received[rank], own.numel(), own.dtype, quantization)

    total = chunk(0).clone()
    for rank in range(1, world.size):
        reduction.combine(total, chunk(rank), out=total)
    reduction.finish(total, world.size)
    return total


def _chunks(tensor: Tensor, size: int) -> list[Tensor]:
    count = tensor.numel()
    bounds = [index * count // size for index in range(size + 1)]
    return [tensor[begin:end] for begin, end in itertools.pairwise(bounds)]


def _wire_buffer(count: int, dtype: torch.dtype, quantization: Quantization) -> Tensor:
    return torch.empty(wire_bytes(count, dtype, quantization), dtype=torch.uint8)
