"""Plans of the collectives that reduce: argument checks, the algorithm for the connections, and the call of c10d.

All functions raise ValueError or TypeError for invalid arguments.
"""

from collections.abc import Callable, Sequence

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
from multiworld.ops.operation import Algorithm, Plan
from multiworld.ops.validation import Ranks, check_list, check_whole, tensor_signature

AnyReduceOp = ReduceOp | ReduceOp.RedOpType

_REDUCTIONS = {name: getattr(ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}


def all_reduce(ranks: Ranks, tensor: Tensor, op: AnyReduceOp) -> Plan:
    """Reduce `tensor` in place at all members. Same dtype and number of elements at all members."""
    on_host = ranks.on_host("all_reduce", (tensor,))
    reduction = _Reduction("all_reduce", ranks, tensor, op)
    options = without_timeout(AllreduceOptions(), reduceOp=reduction.op)
    target = RecvBuffer("all_reduce", tensor, on_host)

    def algorithm() -> Algorithm:
        data = arithmetic(target.materialize(load=True)).reshape(-1)
        return lambda channel: allreduce.all_reduce(channel, data, reduction.name)

    return Plan(
        name="all_reduce",
        signature=f"all_reduce({tensor_signature(tensor)}, {reduction.name})",
        post=lambda group: group.allreduce([arithmetic(target.materialize(load=True))], options),
        algorithm=algorithm if reduction.uses_tcp else None,
        copy_back=reduction.copy_back(target),
        tensors=(tensor,),
        staged=on_host,
    )


def reduce(ranks: Ranks, tensor: Tensor, dst: int, op: AnyReduceOp) -> Plan:
    """Reduce `tensor` in place at rank `dst`; its content at other ranks is undefined afterwards."""
    ranks.check_root("reduce", dst)
    on_host = ranks.on_host("reduce", (tensor,))
    reduction = _Reduction("reduce", ranks, tensor, op)
    options = without_timeout(ReduceOptions(), reduceOp=reduction.op, rootRank=dst, rootTensor=0)
    target = RecvBuffer("reduce", tensor, on_host)

    def algorithm() -> Algorithm:
        data = arithmetic(target.materialize(load=True)).reshape(-1)
        return lambda channel: allreduce.reduce(channel, data, dst, reduction.name)

    return Plan(
        name="reduce",
        signature=f"reduce({tensor_signature(tensor)}, {reduction.name}, dst {dst})",
        post=lambda group: group.reduce([arithmetic(target.materialize(load=True))], options),
        algorithm=algorithm if reduction.uses_tcp else None,
        copy_back=reduction.copy_back(target) if ranks.rank == dst else None,
        tensors=(tensor,),
        staged=on_host,
    )


def reduce_scatter(ranks: Ranks, output: Tensor, input_list: Sequence[Tensor], op: AnyReduceOp) -> Plan:
    """Reduce `input_list[r]` of all members into `output` at rank r. All have the same dtype and number of elements."""
    on_host = ranks.on_host("reduce_scatter", (output, *input_list))
    check_list("reduce_scatter", ranks, input_list, output, written=False)
    sources = [SendBuffer(each, on_host) for each in input_list]
    return _reduce_scatter("reduce_scatter", ranks, output, sources, op, on_host)


def reduce_scatter_tensor(ranks: Ranks, output: Tensor, tensor: Tensor, op: AnyReduceOp) -> Plan:
    """Like `reduce_scatter`, with the inputs in one tensor, in rank order: `ranks.size` times the elements of `output`."""
    on_host = ranks.on_host("reduce_scatter_tensor", (output, tensor))
    check_whole("reduce_scatter_tensor", ranks, tensor, output)
    return _reduce_scatter("reduce_scatter_tensor", ranks, output, [SendBuffer(tensor, on_host)], op, on_host)


def _reduce_scatter(
    name: str, ranks: Ranks, output: Tensor, sources: list[SendBuffer], op: AnyReduceOp, on_host: bool
) -> Plan:
    """Reduce-scatter from one tensor per rank, or from one tensor that holds all of them.

    Gloo has no reduce-scatter. c10d would emulate it with an all-reduce under the timeout of the group; here it has no timeout.
    """
    reduction = _Reduction(name, ranks, output, op)
    target = RecvBuffer(name, output, on_host)
    options = without_timeout(AllreduceOptions(), reduceOp=reduction.op)
    native = without_timeout(ReduceScatterOptions(), reduceOp=reduction.op)
    reduced: list[Tensor] = []

    def parts() -> list[Tensor]:
        return [arithmetic(source.materialize()).reshape(-1) for source in sources]

    def post(group: ProcessGroup) -> Work:
        if not reduction.on_host:
            return group._reduce_scatter_base(arithmetic(target.materialize()).reshape(-1), torch.cat(parts()), native)
        reduced.append(torch.cat(parts()))
        return group.allreduce(reduced, options)

    def copy_back() -> None:
        if reduced:
            own = arithmetic(target.materialize()).reshape(-1)
            with torch.inference_mode():
                own.copy_(reduced.pop()[own.numel() * ranks.rank : own.numel() * (ranks.rank + 1)])
        reduction.finish(target)
        target.copy_back()

    def algorithm() -> Algorithm:
        operands, result = parts(), arithmetic(target.materialize()).reshape(-1)
        by_rank = operands if len(operands) == ranks.size else torch.tensor_split(operands[0], ranks.size)
        return lambda channel: allreduce.reduce_scatter(channel, by_rank, result, reduction.name)

    return Plan(
        name=name,
        signature=f"{name}({tensor_signature(output)}, {reduction.name})",
        post=post,
        algorithm=algorithm if reduction.uses_tcp else None,
        copy_back=reduction.copy_back(target) if reduction.uses_tcp else copy_back,
        tensors=(output, *(source.tensor for source in sources)),
        staged=on_host,
    )


def barrier(ranks: Ranks) -> Plan:
    """Wait until all members have started the barrier: an all-reduce of an empty tensor, or of one element with NCCL."""
    if set(ranks.backends.values()) != {NCCL}:
        return Plan(
            name="barrier",
            signature="barrier()",
            algorithm=lambda: lambda channel: allreduce.all_reduce(channel, torch.empty(0), "SUM"),
        )
    options = without_timeout(AllreduceOptions())
    token = torch.zeros(1, device=ranks.device)
    return Plan(
        name="barrier",
        signature="barrier()",
        post=lambda group: group.allreduce([token], options),
        tensors=(token,),
    )


class _Reduction:
    """A checked `ReduceOp` for the backend of a tensor. With Gloo, AVG is a sum that each rank divides: not all versions support AVG.

    Attributes:
        name: name of the reduction, such as "SUM".
        op: the reduction for c10d.
        on_host: whether the CPU computes the reduction (all backends except NCCL).
        uses_tcp: whether the library's own connections run it, not c10d.
    """

    def __init__(self, name: str, ranks: Ranks, tensor: Tensor, op: AnyReduceOp) -> None:
        reduction = next((key for key, value in _REDUCTIONS.items() if op == value), None)
        if reduction is None:
            raise ValueError(f"{name}: {op} is not supported, only {', '.join(_REDUCTIONS)}")
        self.name = reduction
        self.on_host = ranks.backend(tensor.device.type) != NCCL
        self.uses_tcp = ranks.uses_tcp(tensor)
        if self.on_host:
            check_computable(name, tensor, reduction)
        summed = self.on_host and reduction == "AVG"
        self._divisor = ranks.size if summed else 1
        self.op = ReduceOp(_REDUCTIONS["SUM" if summed else reduction])

    def copy_back(self, target: RecvBuffer) -> Callable[[], None] | None:
        """The function that completes the result after the reduction; None if nothing remains to do."""
        if self.uses_tcp:
            return None if target.direct else target.copy_back

        def copy_back() -> None:
            self.finish(target)
            target.copy_back()

        return copy_back

    def finish(self, target: RecvBuffer) -> None:
        """Divide the sum for AVG with Gloo; else nothing."""
        if self._divisor > 1:
            with torch.inference_mode():
                arithmetic(target.result).div_(self._divisor)
