"""Every collective as a plan: its arguments checked, and how it is handed to c10d.

A function here raises ValueError or TypeError for arguments that cannot be right, before anything is sent: the world is unharmed.
What only the other members know (their sizes) is the business of checked mode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Work,
)

from multiworld.agreement import TAG_LIMIT
from multiworld.buffers import Incoming, Outgoing, arithmetic, check_computable, check_dense, flat_bytes
from multiworld.operation import Plan
from multiworld.process_group import FOREVER

AnyReduceOp = ReduceOp | ReduceOp.RedOpType

_REDUCTIONS = {name: getattr(ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}


@dataclass(frozen=True, slots=True)
class Ranks:
    """What the arguments of an operation are checked against.

    Attributes:
        rank, size: this member, and how many there are.
        backends: device type → c10d backend. With Gloo, tensors of other devices cross through host memory.
    """

    world_name: str
    rank: int
    size: int
    backends: dict[str, str]

    def peer(self, name: str, peer: int) -> int:
        """Raises ValueError unless `peer` is another member."""
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"{name}: rank {peer} is no peer of rank {self.rank} in {self._self}")
        return peer

    def root(self, name: str, root: int) -> int:
        """Raises ValueError unless `root` is a member."""
        if not 0 <= root < self.size:
            raise ValueError(f"{name}: rank {root} does not exist in {self._self}")
        return root

    def on_host(self, name: str, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors, all on one device, must go through host memory. Raises ValueError, TypeError."""
        for tensor in tensors:
            check_dense(name, tensor)
        device = tensors[0].device
        if any(tensor.device != device for tensor in tensors[1:]):
            devices = sorted({str(tensor.device) for tensor in tensors})
            raise ValueError(f"{name}: all tensors must be on one device, got {devices}")
        if self.backends.get(device.type, "gloo") != "gloo":
            return False
        if "gloo" in self.backends.values():
            return device.type != "cpu"
        raise ValueError(f"{name}: {self._self} has no backend for tensors on {device}, only {self.backends}")

    @property
    def _self(self) -> str:
        return f"world {self.world_name!r} of {self.size}"


def send(ranks: Ranks, tensor: Tensor, dst: int, tag: int) -> Plan:
    ranks.peer("send", dst)
    _check_tag("send", tag)
    on_host = ranks.on_host("send", (tensor,))
    source = Outgoing(tensor, on_host)
    return Plan(
        name="send",
        signature=_described(tensor),
        post=lambda group: group.send([source.open()], dst, tag),
        tensors=(tensor,),
        staged=on_host,
        peer=dst,
        tag=tag,
        buffer=lambda: flat_bytes(source.open()),
    )


def recv(ranks: Ranks, tensor: Tensor, src: int, tag: int) -> Plan:
    ranks.peer("recv", src)
    _check_tag("recv", tag)
    on_host = ranks.on_host("recv", (tensor,))
    target = Incoming("recv", tensor, on_host)
    return Plan(
        name="recv",
        signature=_described(tensor),
        post=lambda group: group.recv([target.open()], src, tag),
        deliver=target.deliver,
        tensors=(tensor,),
        staged=on_host,
        peer=src,
        tag=tag,
        buffer=lambda: flat_bytes(target.open()),
    )


def broadcast(ranks: Ranks, tensor: Tensor, src: int) -> Plan:
    ranks.root("broadcast", src)
    on_host = ranks.on_host("broadcast", (tensor,))
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = src, 0, FOREVER
    source = Outgoing(tensor, on_host) if ranks.rank == src else None
    target = Incoming("broadcast", tensor, on_host) if source is None else None

    def post(group: ProcessGroup) -> Work:
        data = source.open() if source is not None else target.open() if target is not None else None
        assert data is not None
        return group.broadcast([flat_bytes(data)], options)

    return Plan(
        name="broadcast",
        signature=f"broadcast({_described(tensor)}, src {src})",
        post=post,
        deliver=target.deliver if target is not None else None,
        tensors=(tensor,),
        staged=on_host,
    )


def all_reduce(ranks: Ranks, tensor: Tensor, op: AnyReduceOp) -> Plan:
    on_host = ranks.on_host("all_reduce", (tensor,))
    reduction = _Reduction("all_reduce", ranks, tensor, op)
    options = AllreduceOptions()
    options.reduceOp, options.timeout = reduction.op, FOREVER
    target = Incoming("all_reduce", tensor, on_host)

    def deliver() -> None:
        reduction.finish(target)
        target.deliver()

    return Plan(
        name="all_reduce",
        signature=f"all_reduce({_described(tensor)}, {reduction.name})",
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
        signature=f"reduce({_described(tensor)}, {reduction.name}, dst {dst})",
        post=lambda group: group.reduce([arithmetic(target.open(load=True))], options),
        deliver=deliver,
        tensors=(tensor,),
        staged=on_host,
    )


def all_gather(ranks: Ranks, tensors: Sequence[Tensor], tensor: Tensor) -> Plan:
    on_host = ranks.on_host("all_gather", (*tensors, tensor))
    _check_list("all_gather", ranks, tensors, tensor, written=True)
    source = Outgoing(tensor, on_host)
    targets = [Incoming("all_gather", each, on_host) for each in tensors]
    options = AllgatherOptions()
    options.timeout = FOREVER
    return Plan(
        name="all_gather",
        signature=f"all_gather({_described(tensor)})",
        post=lambda group: group.allgather(
            [[flat_bytes(target.open()) for target in targets]], [flat_bytes(source.open())], options
        ),
        deliver=lambda: _deliver(targets),
        tensors=(*tensors, tensor),
        staged=on_host,
    )


def all_gather_into_tensor(ranks: Ranks, output: Tensor, tensor: Tensor) -> Plan:
    on_host = ranks.on_host("all_gather_into_tensor", (output, tensor))
    _check_whole("all_gather_into_tensor", ranks, output, tensor)
    source, target = Outgoing(tensor, on_host), Incoming("all_gather_into_tensor", output, on_host)
    options = AllgatherOptions()
    options.timeout = FOREVER
    return Plan(
        name="all_gather_into_tensor",
        signature=f"all_gather_into_tensor({_described(tensor)})",
        post=lambda group: group._allgather_base(flat_bytes(target.open()), flat_bytes(source.open()), options),
        deliver=target.deliver,
        tensors=(output, tensor),
        staged=on_host,
    )


def gather(ranks: Ranks, tensor: Tensor, gather_list: Sequence[Tensor] | None, dst: int) -> Plan:
    ranks.root("gather", dst)
    parts = _parts_of_root("gather", ranks, gather_list, dst, "gather_list")
    on_host = ranks.on_host("gather", (*parts, tensor))
    if ranks.rank == dst:
        _check_list("gather", ranks, parts, tensor, written=True)
    source = Outgoing(tensor, on_host)
    targets = [Incoming("gather", each, on_host) for each in parts]
    options = GatherOptions()
    options.rootRank, options.timeout = dst, FOREVER

    def post(group: ProcessGroup) -> Work:
        outputs = [[flat_bytes(target.open()) for target in targets]] if targets else []
        return group.gather(outputs, [flat_bytes(source.open())], options)

    return Plan(
        name="gather",
        signature=f"gather({_described(tensor)}, dst {dst})",
        post=post,
        deliver=lambda: _deliver(targets),
        tensors=(*parts, tensor),
        staged=on_host,
    )


def scatter(ranks: Ranks, tensor: Tensor, scatter_list: Sequence[Tensor] | None, src: int) -> Plan:
    ranks.root("scatter", src)
    parts = _parts_of_root("scatter", ranks, scatter_list, src, "scatter_list")
    on_host = ranks.on_host("scatter", (*parts, tensor))
    if ranks.rank == src:
        _check_list("scatter", ranks, parts, tensor, written=False)
    sources = [Outgoing(each, on_host) for each in parts]
    target = Incoming("scatter", tensor, on_host)
    options = ScatterOptions()
    options.rootRank, options.timeout = src, FOREVER

    def post(group: ProcessGroup) -> Work:
        inputs = [[flat_bytes(source.open()) for source in sources]] if sources else []
        return group.scatter([flat_bytes(target.open())], inputs, options)

    return Plan(
        name="scatter",
        signature=f"scatter({_described(tensor)}, src {src})",
        post=post,
        deliver=target.deliver,
        tensors=(*parts, tensor),
        staged=on_host,
    )


def reduce_scatter(ranks: Ranks, output: Tensor, input_list: Sequence[Tensor], op: AnyReduceOp) -> Plan:
    on_host = ranks.on_host("reduce_scatter", (output, *input_list))
    _check_list("reduce_scatter", ranks, input_list, output, written=False)
    sources = [Outgoing(each, on_host) for each in input_list]
    return _reduce_scatter("reduce_scatter", ranks, output, sources, op, on_host)


def reduce_scatter_tensor(ranks: Ranks, output: Tensor, tensor: Tensor, op: AnyReduceOp) -> Plan:
    on_host = ranks.on_host("reduce_scatter_tensor", (output, tensor))
    _check_whole("reduce_scatter_tensor", ranks, tensor, output)
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
        signature=f"{name}({_described(output)}, {reduction.name})",
        post=post,
        deliver=deliver,
        tensors=(output, *(source.tensor for source in sources)),
        staged=on_host,
    )


def all_to_all(ranks: Ranks, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Plan:
    for tensors, what in ((outputs, "output"), (inputs, "input")):
        if len(tensors) != ranks.size:
            raise ValueError(f"all_to_all: expected one {what} for each of the {ranks.size} ranks, got {len(tensors)}")
    on_host = ranks.on_host("all_to_all", (*outputs, *inputs))
    dtype = inputs[0].dtype
    if any(each.dtype is not dtype for each in (*outputs, *inputs)):
        raise TypeError(
            f"all_to_all: all tensors must be of one dtype, got {sorted({str(t.dtype) for t in (*outputs, *inputs)})}"
        )
    if outputs[ranks.rank].numel() != inputs[ranks.rank].numel():
        raise ValueError("all_to_all: what a rank sends to itself must have the size that it receives from itself")
    _check_distinct("all_to_all", outputs)
    sources = [Outgoing(each, on_host) for each in inputs]
    targets = [Incoming("all_to_all", each, on_host) for each in outputs]
    sent, expected = [each.nbytes for each in inputs], [each.nbytes for each in outputs]
    options = AllToAllOptions()
    options.timeout = FOREVER
    received: list[Tensor] = []

    def post(group: ProcessGroup) -> Work:
        data = torch.cat([flat_bytes(source.open()) for source in sources])
        received.append(torch.empty(sum(expected), dtype=torch.uint8, device=data.device))
        return group.alltoall_base(received[0], data, expected, sent, options)

    def deliver() -> None:
        with torch.inference_mode():
            for target, part in zip(targets, received.pop().split_with_sizes(expected), strict=True):
                flat_bytes(target.open()).copy_(part)
        _deliver(targets)

    return Plan(
        name="all_to_all",
        signature=f"all_to_all({str(dtype).removeprefix('torch.')})",
        post=post,
        deliver=deliver,
        tensors=(*outputs, *inputs),
        staged=on_host,
        splits_bytes=(sent, expected),
    )


def barrier(ranks: Ranks) -> Plan:
    device = "cpu" if "gloo" in ranks.backends.values() else next(iter(ranks.backends))
    options = AllreduceOptions()
    options.timeout = FOREVER
    token = torch.zeros(1, device=device)
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
                target.result.div_(self._divisor)


def _check_tag(name: str, tag: int) -> None:
    if not 0 <= tag < TAG_LIMIT:
        raise ValueError(f"{name}: a tag must be from 0 to {TAG_LIMIT - 1}, got {tag}")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]"


def _deliver(targets: list[Incoming]) -> None:
    for target in targets:
        target.deliver()


def _parts_of_root(
    name: str, ranks: Ranks, parts: Sequence[Tensor] | None, root: int, argument: str
) -> Sequence[Tensor]:
    """The list that only the root gives; what others give is ignored, as long as it is empty or None."""
    if ranks.rank != root:
        if parts:
            raise ValueError(f"{name}: {argument} is for rank {root} alone; give None on rank {ranks.rank}")
        return ()
    if not parts:
        raise ValueError(f"{name}: rank {root} is the root and must give {argument}, one tensor a rank")
    return parts


def _check_list(name: str, ranks: Ranks, tensors: Sequence[Tensor], tensor: Tensor, *, written: bool) -> None:
    if len(tensors) != ranks.size:
        raise ValueError(f"{name}: expected a list of {ranks.size} tensors, one a rank, got {len(tensors)}")
    for index, each in enumerate(tensors):
        if each.dtype is not tensor.dtype:
            raise TypeError(f"{name}: tensor {index} of the list is {each.dtype}, the other tensor {tensor.dtype}")
        if each.numel() != tensor.numel():
            raise ValueError(
                f"{name}: tensor {index} of the list has shape {tuple(each.shape)}, the other tensor {tuple(tensor.shape)}"
            )
    if written:
        _check_distinct(name, tensors)


def _check_distinct(name: str, outputs: Sequence[Tensor]) -> None:
    filled = [each.data_ptr() for each in outputs if each.numel()]
    if len(set(filled)) != len(filled):
        raise ValueError(f"{name}: the same memory was given for the results of several ranks")


def _check_whole(name: str, ranks: Ranks, whole: Tensor, part: Tensor) -> None:
    if whole.dtype is not part.dtype:
        raise TypeError(f"{name}: one tensor is {whole.dtype}, the other {part.dtype}")
    if whole.numel() != ranks.size * part.numel():
        raise ValueError(
            f"{name}: a tensor of {ranks.size} times {tuple(part.shape)} is needed, got {tuple(whole.shape)}"
        )
