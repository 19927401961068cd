"""The collectives that reduce: argument checks, the algorithm for the connections, and the call of c10d for NCCL.

All functions raise ValueError or TypeError for invalid arguments.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, ReduceOp, Work

from multiworld.collectives import allreduce
from multiworld.ops.buffers import RecvBuffer, arithmetic, check_computable, contiguous, copy_back_of
from multiworld.ops.operation import Algorithm, Collective
from multiworld.ops.validation import WorldFacts, check_list, check_whole, tensor_signature

AnyReduceOp = ReduceOp | ReduceOp.RedOpType

_REDUCTIONS = {name: getattr(ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}


def all_reduce(facts: WorldFacts, tensor: Tensor, op: AnyReduceOp) -> Collective:
    """Reduce `tensor` in place at all members. Same dtype and number of elements at all members."""
    return _reduce_in_place("all_reduce", facts, tensor, op, None)


def reduce(facts: WorldFacts, tensor: Tensor, dst: int, op: AnyReduceOp) -> Collective:
    """Reduce `tensor` in place at rank `dst`; its content at other ranks is undefined afterwards."""
    facts.check_root("reduce", dst)
    return _reduce_in_place("reduce", facts, tensor, op, dst)


def _reduce_in_place(name: str, facts: WorldFacts, tensor: Tensor, op: AnyReduceOp, dst: int | None) -> Collective:
    """Reduce `tensor` at rank `dst`, or at all ranks if `dst` is None."""
    staged = facts.check_devices(name, (tensor,))
    reduction = _checked(name, facts, tensor, op)
    target = RecvBuffer(name, tensor, staged)

    def load() -> Tensor:
        return arithmetic(target.materialize(load=True)).reshape(-1)

    def algorithm() -> Algorithm:
        data = load()
        if dst is None:
            return lambda channel: allreduce.all_reduce(channel, data, data, reduction)
        return lambda channel: allreduce.reduce(channel, data, dst, reduction)

    def post(group: ProcessGroup) -> Work:
        c10d_op = ReduceOp(_REDUCTIONS[reduction])
        return group.allreduce([load()], c10d_op) if dst is None else group.reduce(load(), dst, c10d_op)

    return Collective(
        signature=f"{name}({tensor_signature(tensor)}, {reduction}{'' if dst is None else f', dst {dst}'})",
        algorithm=algorithm,
        post=post if facts.uses_nccl(tensor) else None,
        copy_back=copy_back_of([target] if dst in (None, facts.rank) else []),
        tensors=(tensor,),
        staged=staged,
    )


def reduce_scatter(facts: WorldFacts, output: Tensor, input_list: Sequence[Tensor], op: AnyReduceOp) -> Collective:
    """Reduce `input_list[r]` of all members into `output` at rank r. All have the same dtype and number of elements."""
    staged = facts.check_devices("reduce_scatter", (output, *input_list))
    check_list("reduce_scatter", facts, input_list, output, written=False)
    return _reduce_scatter("reduce_scatter", facts, output, input_list, op, staged)


def reduce_scatter_tensor(facts: WorldFacts, output: Tensor, tensor: Tensor, op: AnyReduceOp) -> Collective:
    """Like `reduce_scatter`, with the inputs in one tensor, in rank order: `facts.size` times the elements of `output`."""
    staged = facts.check_devices("reduce_scatter_tensor", (output, tensor))
    check_whole("reduce_scatter_tensor", facts, tensor, output)
    return _reduce_scatter("reduce_scatter_tensor", facts, output, [tensor], op, staged)


def _reduce_scatter(
    name: str, facts: WorldFacts, output: Tensor, inputs: Sequence[Tensor], op: AnyReduceOp, staged: bool
) -> Collective:
    """Reduce-scatter from one tensor per rank, or from one tensor that holds all of them."""
    reduction = _checked(name, facts, output, op)
    target = RecvBuffer(name, output, staged)

    def load() -> tuple[list[Tensor], Tensor]:
        parts = [arithmetic(contiguous(each, staged)).reshape(-1) for each in inputs]
        if len(parts) == 1:
            parts = list(torch.tensor_split(parts[0], facts.size))
        return parts, arithmetic(target.materialize()).reshape(-1)

    def algorithm() -> Algorithm:
        parts, result = load()
        return lambda channel: allreduce.reduce_scatter(channel, parts, result, reduction)

    def post(group: ProcessGroup) -> Work:
        parts, result = load()
        return group.reduce_scatter(result, parts, ReduceOp(_REDUCTIONS[reduction]))

    return Collective(
        signature=f"{name}({tensor_signature(output)}, {reduction})",
        algorithm=algorithm,
        post=post if facts.uses_nccl(output) else None,
        copy_back=copy_back_of([target]),
        tensors=(output, *inputs),
        staged=staged,
    )


def barrier(_facts: WorldFacts) -> Collective:
    """Wait until all members have started the barrier: an all-reduce of an empty tensor on the host, also with NCCL."""
    token = torch.empty(0, device="cpu")
    return Collective(
        signature="barrier()",
        algorithm=lambda: lambda channel: allreduce.all_reduce(channel, token, token, "SUM"),
    )


def _checked(what: str, facts: WorldFacts, tensor: Tensor, op: AnyReduceOp) -> str:
    """Return the name of a `ReduceOp`, such as "SUM", that the backend of `tensor` supports for its dtype. NCCL checks dtypes itself.

    Raises ValueError for an unknown operation, TypeError for the dtype.
    """
    name = next((key for key, value in _REDUCTIONS.items() if op == value), None)
    if name is None:
        raise ValueError(f"{what}: {op!s:.40} is not supported, only {', '.join(_REDUCTIONS)}")
    if not facts.uses_nccl(tensor):
        check_computable(what, tensor, name)
    return name
