"""The collectives that reduce: argument checks, the algorithm for the connections, and the call of c10d for NCCL.

All functions raise ValueError or TypeError for invalid arguments.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    ProcessGroup,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    Work,
)

from multiworld.collectives import allreduce
from multiworld.execution.process_group import NCCL, without_timeout
from multiworld.ops.buffers import RecvBuffer, SendBuffer, arithmetic, check_computable
from multiworld.ops.operation import Algorithm, Collective, Post
from multiworld.ops.validation import Ranks, check_list, check_whole, tensor_signature

AnyReduceOp = ReduceOp | ReduceOp.RedOpType

_REDUCTIONS = {name: getattr(ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}


def all_reduce(ranks: Ranks, tensor: Tensor, op: AnyReduceOp) -> Collective:
    """Reduce `tensor` in place at all members. Same dtype and number of elements at all members."""
    staged = ranks.check_devices("all_reduce", (tensor,))
    name = _checked("all_reduce", ranks, tensor, op)
    target = RecvBuffer("all_reduce", tensor, staged)
    options = without_timeout(AllreduceOptions(), reduceOp=ReduceOp(_REDUCTIONS[name]))

    def algorithm() -> Algorithm:
        data = arithmetic(target.materialize(load=True)).reshape(-1)
        return lambda channel: allreduce.all_reduce(channel, data, data, name)

    own = ranks.uses_own_connections(tensor)
    return Collective(
        name="all_reduce",
        signature=f"all_reduce({tensor_signature(tensor)}, {name})",
        algorithm=algorithm if own else None,
        post=None if own else lambda group: group.allreduce([arithmetic(target.materialize(load=True))], options),
        copy_back=None if target.direct else target.copy_back,
        tensors=(tensor,),
        staged=staged,
    )


def reduce(ranks: Ranks, tensor: Tensor, dst: int, op: AnyReduceOp) -> Collective:
    """Reduce `tensor` in place at rank `dst`; its content at other ranks is undefined afterwards."""
    ranks.check_root("reduce", dst)
    staged = ranks.check_devices("reduce", (tensor,))
    name = _checked("reduce", ranks, tensor, op)
    target = RecvBuffer("reduce", tensor, staged)
    options = without_timeout(ReduceOptions(), reduceOp=ReduceOp(_REDUCTIONS[name]), rootRank=dst, rootTensor=0)

    def algorithm() -> Algorithm:
        data = arithmetic(target.materialize(load=True)).reshape(-1)
        return lambda channel: allreduce.reduce(channel, data, dst, name)

    own = ranks.uses_own_connections(tensor)
    return Collective(
        name="reduce",
        signature=f"reduce({tensor_signature(tensor)}, {name}, dst {dst})",
        algorithm=algorithm if own else None,
        post=None if own else lambda group: group.reduce([arithmetic(target.materialize(load=True))], options),
        copy_back=None if target.direct or ranks.rank != dst else target.copy_back,
        tensors=(tensor,),
        staged=staged,
    )


def reduce_scatter(ranks: Ranks, output: Tensor, input_list: Sequence[Tensor], op: AnyReduceOp) -> Collective:
    """Reduce `input_list[r]` of all members into `output` at rank r. All have the same dtype and number of elements."""
    staged = ranks.check_devices("reduce_scatter", (output, *input_list))
    check_list("reduce_scatter", ranks, input_list, output, written=False)
    sources = [SendBuffer(each, staged) for each in input_list]
    return _reduce_scatter("reduce_scatter", ranks, output, sources, op, staged)


def reduce_scatter_tensor(ranks: Ranks, output: Tensor, tensor: Tensor, op: AnyReduceOp) -> Collective:
    """Like `reduce_scatter`, with the inputs in one tensor, in rank order: `ranks.size` times the elements of `output`."""
    staged = ranks.check_devices("reduce_scatter_tensor", (output, tensor))
    check_whole("reduce_scatter_tensor", ranks, tensor, output)
    return _reduce_scatter("reduce_scatter_tensor", ranks, output, [SendBuffer(tensor, staged)], op, staged)


def _reduce_scatter(
    name: str, ranks: Ranks, output: Tensor, sources: list[SendBuffer], op: AnyReduceOp, staged: bool
) -> Collective:
    """Reduce-scatter from one tensor per rank, or from one tensor that holds all of them."""
    reduction = _checked(name, ranks, output, op)
    target = RecvBuffer(name, output, staged)
    options = without_timeout(ReduceScatterOptions(), reduceOp=ReduceOp(_REDUCTIONS[reduction]))

    def operands() -> tuple[list[Tensor], Tensor]:
        parts = [arithmetic(source.materialize()).reshape(-1) for source in sources]
        return parts, arithmetic(target.materialize()).reshape(-1)

    def algorithm() -> Algorithm:
        parts, result = operands()
        by_rank = parts if len(parts) == ranks.size else torch.tensor_split(parts[0], ranks.size)
        return lambda channel: allreduce.reduce_scatter(channel, by_rank, result, reduction)

    def post(group: ProcessGroup) -> Work:
        parts, result = operands()
        return group._reduce_scatter_base(result, torch.cat(parts), options)

    own = ranks.uses_own_connections(output)
    return Collective(
        name=name,
        signature=f"{name}({tensor_signature(output)}, {reduction})",
        algorithm=algorithm if own else None,
        post=None if own else post,
        copy_back=None if target.direct else target.copy_back,
        tensors=(output, *(source.tensor for source in sources)),
        staged=staged,
    )


def barrier(ranks: Ranks) -> Collective:
    """Wait until all members have started the barrier: an all-reduce of an empty tensor, or of one element with NCCL."""
    if set(ranks.backends.values()) != {NCCL}:
        empty = torch.empty(0)
        return Collective(
            name="barrier",
            signature="barrier()",
            algorithm=lambda: lambda channel: allreduce.all_reduce(channel, empty, empty, "SUM"),
        )
    options = without_timeout(AllreduceOptions())
    token = torch.zeros(1, device=ranks.device)
    post: Post = lambda group: group.allreduce([token], options)  # noqa: E731
    return Collective(name="barrier", signature="barrier()", post=post, tensors=(token,))


def _name(what: str, op: AnyReduceOp) -> str:
    """The name of a `ReduceOp`, such as "SUM". Raises ValueError for an unknown one."""
    name = next((key for key, value in _REDUCTIONS.items() if op == value), None)
    if name is None:
        raise ValueError(f"{what}: {op} is not supported, only {', '.join(_REDUCTIONS)}")
    return name


def _checked(what: str, ranks: Ranks, tensor: Tensor, op: AnyReduceOp) -> str:
    """The name of a `ReduceOp` that the backend of `tensor` supports for its dtype. NCCL checks dtypes itself."""
    name = _name(what, op)
    if ranks.uses_own_connections(tensor):
        check_computable(what, tensor, name)
    return name
