"""The collectives that compute, as plans: their arguments checked, and how they go over the lines or are handed to c10d."""

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

from multiworld import shares
from multiworld.arguments import Ranks, check_list, check_whole, described
from multiworld.buffers import Incoming, Outgoing, arithmetic, check_computable
from multiworld.operation import Plan
from multiworld.process_group import FOREVER

AnyReduceOp = ReduceOp | ReduceOp.RedOpType

GLOO_FROM_BYTES = 1 << 21
"""From here on Gloo reduces faster than the lines where members are more than two (measured with four members on two cores)."""

_REDUCTIONS = {name: getattr(ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}


def all_reduce(ranks: Ranks, tensor: Tensor, op: AnyReduceOp) -> Plan:
    on_host = ranks.message_on_host("all_reduce", tensor)
    reduction = _Reduction("all_reduce", ranks, tensor, op)
    options = AllreduceOptions()
    options.reduceOp, options.timeout = reduction.op, FOREVER
    target = Incoming("all_reduce", tensor, on_host)
    signature = f"all_reduce({described(tensor)}, {reduction.name})"
    has_gloo = reduction.on_gloo and bool(ranks.backends)
    if reduction.on_gloo and not (has_gloo and ranks.size > 2 and tensor.nbytes >= GLOO_FROM_BYTES):
        return Plan(
            name="all_reduce",
            signature=signature,
            buffer=lambda: arithmetic(target.open(load=True)).reshape(-1),
            script=lambda exchange, data: shares.all_reduce(exchange, data, reduction.name),
            deliver=None if target.direct else target.deliver,
            tensors=(tensor,),
            staged=on_host,
        )

    def deliver() -> None:
        reduction.finish(target)
        target.deliver()

    return Plan(
        name="all_reduce",
        signature=signature,
        post=lambda group: group.allreduce([arithmetic(target.open(load=True))], options),
        deliver=deliver,
        tensors=(tensor,),
        staged=on_host,
    )


def reduce(ranks: Ranks, tensor: Tensor, dst: int, op: AnyReduceOp) -> Plan:
    ranks.root("reduce", dst)
    on_host = ranks.on_host("reduce", (tensor,))
    reduction = _Reduction("reduce", ranks, tensor, op)
    options = ReduceOptions()
    options.reduceOp, options.rootRank, options.rootTensor, options.timeout = reduction.op, dst, 0, FOREVER
    target = Incoming("reduce", tensor, on_host)

    def deliver() -> None:
        if ranks.rank == dst:
            reduction.finish(target)
            target.deliver()

    return Plan(
        name="reduce",
        signature=f"reduce({described(tensor)}, {reduction.name}, dst {dst})",
        post=lambda group: group.reduce([arithmetic(target.open(load=True))], options),
        deliver=deliver,
        tensors=(tensor,),
        staged=on_host,
    )


def reduce_scatter(ranks: Ranks, output: Tensor, input_list: Sequence[Tensor], op: AnyReduceOp) -> Plan:
    on_host = ranks.on_host("reduce_scatter", (output, *input_list))
    check_list("reduce_scatter", ranks, input_list, output, written=False)
    sources = [Outgoing(each, on_host) for each in input_list]
    return _reduce_scatter("reduce_scatter", ranks, output, sources, op, on_host)


def reduce_scatter_tensor(ranks: Ranks, output: Tensor, tensor: Tensor, op: AnyReduceOp) -> Plan:
    on_host = ranks.on_host("reduce_scatter_tensor", (output, tensor))
    check_whole("reduce_scatter_tensor", ranks, tensor, output)
    return _reduce_scatter("reduce_scatter_tensor", ranks, output, [Outgoing(tensor, on_host)], op, on_host)


def _reduce_scatter(
    name: str, ranks: Ranks, output: Tensor, sources: list[Outgoing], op: AnyReduceOp, on_host: bool
) -> Plan:
    """Gloo has none of its own: c10d's reduces everything everywhere and picks, under the group's timeout. So do we, under ours."""
    reduction = _Reduction(name, ranks, output, op)
    target = Incoming(name, output, on_host)
    options, native = AllreduceOptions(), ReduceScatterOptions()
    options.reduceOp, options.timeout = reduction.op, FOREVER
    native.reduceOp, native.timeout = reduction.op, FOREVER
    reduced: list[Tensor] = []

    def post(group: ProcessGroup) -> Work:
        parts = [arithmetic(source.open()).reshape(-1) for source in sources]
        if not reduction.on_gloo:
            return group._reduce_scatter_base(arithmetic(target.open()).reshape(-1), torch.cat(parts), native)
        reduced.append(torch.cat(parts))
        return group.allreduce(reduced, options)

    def deliver() -> None:
        if reduced:
            mine = arithmetic(target.open()).reshape(-1)
            with torch.inference_mode():
                mine.copy_(reduced.pop()[mine.numel() * ranks.rank : mine.numel() * (ranks.rank + 1)])
        reduction.finish(target)
        target.deliver()

    return Plan(
        name=name,
        signature=f"{name}({described(output)}, {reduction.name})",
        post=post,
        deliver=deliver,
        tensors=(output, *(source.tensor for source in sources)),
        staged=on_host,
    )


def barrier(ranks: Ranks) -> Plan:
    if "gloo" in ranks.backends.values() or not ranks.backends:
        return Plan(
            name="barrier",
            signature="barrier()",
            buffer=lambda: torch.empty(0),
            script=lambda exchange, nothing: shares.all_reduce(exchange, nothing, "SUM"),
        )
    options = AllreduceOptions()
    options.timeout = FOREVER
    token = torch.zeros(1, device=next(iter(ranks.backends)))
    return Plan(
        name="barrier",
        signature="barrier()",
        post=lambda group: group.allreduce([token], options),
        tensors=(token,),
    )


class _Reduction:
    """A `ReduceOp` as the backend can do it. Gloo's average is a sum that every rank divides: not all of its versions have one."""

    def __init__(self, name: str, ranks: Ranks, tensor: Tensor, op: AnyReduceOp) -> None:
        known = next((key for key, value in _REDUCTIONS.items() if op == value), None)
        if known is None:
            raise ValueError(f"{name}: {op} is not supported, only {', '.join(_REDUCTIONS)}")
        self.name = known
        self.on_gloo = ranks.backends.get(tensor.device.type, "gloo") == "gloo"
        if self.on_gloo:
            check_computable(name, tensor, known)
        summed = self.on_gloo and known == "AVG"
        self._divisor = ranks.size if summed else 1
        self.op = ReduceOp(_REDUCTIONS["SUM" if summed else known])

    def finish(self, target: Incoming) -> None:
        if self._divisor > 1:
            with torch.inference_mode():
                arithmetic(target.result).div_(self._divisor)
