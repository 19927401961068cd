"""Plans of the collectives that reduce: argument checks, the script for the connections, and the call of c10d.

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

from multiworld.collectives import allreduce as shares
from multiworld.execution.process_group import FOREVER, NCCL
from multiworld.ops.buffers import RecvBuffer, SendBuffer, arithmetic, check_computable
from multiworld.ops.operation import Plan, Script
from multiworld.ops.validation import Ranks, check_list, check_whole, described

AnyReduceOp = ReduceOp | ReduceOp.RedOpType

_REDUCTIONS = {name: getattr(ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}


def all_reduce(ranks: Ranks, tensor: Tensor, op: AnyReduceOp) -> Plan:
    """Reduce `tensor` in place at all members. Same dtype and number of elements at all members."""
    on_host = ranks.on_host("all_reduce", (tensor,))
    reduction = _Reduction("all_reduce", ranks, tensor, op)
    options = AllreduceOptions()
    options.reduceOp, options.timeout = reduction.op, FOREVER
    target = RecvBuffer("all_reduce", tensor, on_host)

    def script() -> Script:
        data = arithmetic(target.open(load=True)).reshape(-1)
        return lambda exchange: shares.all_reduce(exchange, data, reduction.name)

    return Plan(
        name="all_reduce",
        signature=f"all_reduce({described(tensor)}, {reduction.name})",
        post=lambda group: group.allreduce([arithmetic(target.open(load=True))], options),
        script=script if reduction.over_lines else None,
        deliver=reduction.delivery(target),
        tensors=(tensor,),
        staged=on_host,
    )


def reduce(ranks: Ranks, tensor: Tensor, dst: int, op: AnyReduceOp) -> Plan:
    """Reduce `tensor` in place at rank `dst`; its content at other ranks is undefined afterwards."""
    ranks.root("reduce", dst)
    on_host = ranks.on_host("reduce", (tensor,))
    reduction = _Reduction("reduce", ranks, tensor, op)
    options = ReduceOptions()
    options.reduceOp, options.rootRank, options.rootTensor, options.timeout = reduction.op, dst, 0, FOREVER
    target = RecvBuffer("reduce", tensor, on_host)

    def script() -> Script:
        data = arithmetic(target.open(load=True)).reshape(-1)
        return lambda exchange: shares.reduce(exchange, data, dst, reduction.name)

    return Plan(
        name="reduce",
        signature=f"reduce({described(tensor)}, {reduction.name}, dst {dst})",
        post=lambda group: group.reduce([arithmetic(target.open(load=True))], options),
        script=script if reduction.over_lines else None,
        deliver=reduction.delivery(target) if ranks.rank == dst else None,
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

    Gloo has no reduce-scatter. c10d emulates it with an all-reduce and the timeout of the group; this emulates it with our timeout.
    """
    reduction = _Reduction(name, ranks, output, op)
    target = RecvBuffer(name, output, on_host)
    options, native = AllreduceOptions(), ReduceScatterOptions()
    options.reduceOp, options.timeout = reduction.op, FOREVER
    native.reduceOp, native.timeout = reduction.op, FOREVER
    reduced: list[Tensor] = []

    def parts() -> list[Tensor]:
        return [arithmetic(source.open()).reshape(-1) for source in sources]

    def post(group: ProcessGroup) -> Work:
        if not reduction.on_host:
            return group._reduce_scatter_base(arithmetic(target.open()).reshape(-1), torch.cat(parts()), native)
        reduced.append(torch.cat(parts()))
        return group.allreduce(reduced, options)

    def deliver() -> None:
        if reduced:
            mine = arithmetic(target.open()).reshape(-1)
            with torch.inference_mode():
                mine.copy_(reduced.pop()[mine.numel() * ranks.rank : mine.numel() * (ranks.rank + 1)])
        reduction.finish(target)
        target.deliver()

    def script() -> Script:
        given, result = parts(), arithmetic(target.open()).reshape(-1)
        by_rank = given if len(given) == ranks.size else torch.tensor_split(given[0], ranks.size)
        return lambda exchange: shares.reduce_scatter(exchange, by_rank, result, reduction.name)

    return Plan(
        name=name,
        signature=f"{name}({described(output)}, {reduction.name})",
        post=post,
        script=script if reduction.over_lines else None,
        deliver=reduction.delivery(target) if reduction.over_lines else deliver,
        tensors=(output, *(source.tensor for source in sources)),
        staged=on_host,
    )


def barrier(ranks: Ranks) -> Plan:
    """Wait until all members have started the barrier: an all-reduce of an empty tensor, or of one element with NCCL."""
    if set(ranks.backends.values()) != {NCCL}:
        return Plan(
            name="barrier",
            signature="barrier()",
            script=lambda: lambda exchange: shares.all_reduce(exchange, torch.empty(0), "SUM"),
        )
    options = AllreduceOptions()
    options.timeout = FOREVER
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
        op: what c10d is given.
        on_host: whether the CPU computes the reduction (all backends except NCCL).
        over_lines: whether the library's own connections carry it, not c10d.
    """

    def __init__(self, name: str, ranks: Ranks, tensor: Tensor, op: AnyReduceOp) -> None:
        known = next((key for key, value in _REDUCTIONS.items() if op == value), None)
        if known is None:
            raise ValueError(f"{name}: {op} is not supported, only {', '.join(_REDUCTIONS)}")
        self.name = known
        self.on_host = ranks.carrier(tensor.device.type) != NCCL
        self.over_lines = ranks.over_lines(tensor)
        if self.on_host:
            check_computable(name, tensor, known)
        summed = self.on_host and known == "AVG"
        self._divisor = ranks.size if summed else 1
        self.op = ReduceOp(_REDUCTIONS["SUM" if summed else known])

    def delivery(self, target: RecvBuffer) -> Callable[[], None] | None:
        """The function that completes the result after the reduction; None if nothing remains to do."""
        if self.over_lines:
            return None if target.direct else target.deliver

        def deliver() -> None:
            self.finish(target)
            target.deliver()

        return deliver

    def finish(self, target: RecvBuffer) -> None:
        """Divide the sum for AVG with Gloo; else nothing."""
        if self._divisor > 1:
            with torch.inference_mode():
                arithmetic(target.result).div_(self._divisor)
