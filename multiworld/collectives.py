"""The collectives that move data, as plans: their arguments checked, and how they are handed to c10d. All of it moves as bytes."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ScatterOptions,
    Work,
)

from multiworld.arguments import Ranks, check_distinct, check_list, check_whole, described, parts_of_root
from multiworld.buffers import Incoming, Outgoing, flat_bytes
from multiworld.operation import Plan
from multiworld.process_group import FOREVER


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
        signature=f"broadcast({described(tensor)}, src {src})",
        post=post,
        deliver=target.deliver if target is not None else None,
        tensors=(tensor,),
        staged=on_host,
    )


def all_gather(ranks: Ranks, tensors: Sequence[Tensor], tensor: Tensor) -> Plan:
    on_host = ranks.on_host("all_gather", (*tensors, tensor))
    check_list("all_gather", ranks, tensors, tensor, written=True)
    source = Outgoing(tensor, on_host)
    targets = [Incoming("all_gather", each, on_host) for each in tensors]
    options = AllgatherOptions()
    options.timeout = FOREVER
    return Plan(
        name="all_gather",
        signature=f"all_gather({described(tensor)})",
        post=lambda group: group.allgather(
            [[flat_bytes(target.open()) for target in targets]], [flat_bytes(source.open())], options
        ),
        deliver=lambda: _deliver(targets),
        tensors=(*tensors, tensor),
        staged=on_host,
    )


def all_gather_into_tensor(ranks: Ranks, output: Tensor, tensor: Tensor) -> Plan:
    on_host = ranks.on_host("all_gather_into_tensor", (output, tensor))
    check_whole("all_gather_into_tensor", ranks, output, tensor)
    source, target = Outgoing(tensor, on_host), Incoming("all_gather_into_tensor", output, on_host)
    options = AllgatherOptions()
    options.timeout = FOREVER
    return Plan(
        name="all_gather_into_tensor",
        signature=f"all_gather_into_tensor({described(tensor)})",
        post=lambda group: group._allgather_base(flat_bytes(target.open()), flat_bytes(source.open()), options),
        deliver=target.deliver,
        tensors=(output, tensor),
        staged=on_host,
    )


def gather(ranks: Ranks, tensor: Tensor, gather_list: Sequence[Tensor] | None, dst: int) -> Plan:
    ranks.root("gather", dst)
    parts = parts_of_root("gather", ranks, gather_list, dst, "gather_list")
    on_host = ranks.on_host("gather", (*parts, tensor))
    if ranks.rank == dst:
        check_list("gather", ranks, parts, tensor, written=True)
    source = Outgoing(tensor, on_host)
    targets = [Incoming("gather", each, on_host) for each in parts]
    options = GatherOptions()
    options.rootRank, options.timeout = dst, FOREVER

    def post(group: ProcessGroup) -> Work:
        outputs = [[flat_bytes(target.open()) for target in targets]] if targets else []
        return group.gather(outputs, [flat_bytes(source.open())], options)

    return Plan(
        name="gather",
        signature=f"gather({described(tensor)}, dst {dst})",
        post=post,
        deliver=lambda: _deliver(targets),
        tensors=(*parts, tensor),
        staged=on_host,
    )


def scatter(ranks: Ranks, tensor: Tensor, scatter_list: Sequence[Tensor] | None, src: int) -> Plan:
    ranks.root("scatter", src)
    parts = parts_of_root("scatter", ranks, scatter_list, src, "scatter_list")
    on_host = ranks.on_host("scatter", (*parts, tensor))
    if ranks.rank == src:
        check_list("scatter", ranks, parts, tensor, written=False)
    sources = [Outgoing(each, on_host) for each in parts]
    target = Incoming("scatter", tensor, on_host)
    options = ScatterOptions()
    options.rootRank, options.timeout = src, FOREVER

    def post(group: ProcessGroup) -> Work:
        inputs = [[flat_bytes(source.open()) for source in sources]] if sources else []
        return group.scatter([flat_bytes(target.open())], inputs, options)

    return Plan(
        name="scatter",
        signature=f"scatter({described(tensor)}, src {src})",
        post=post,
        deliver=target.deliver,
        tensors=(*parts, tensor),
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
    check_distinct("all_to_all", outputs)
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


def _deliver(targets: list[Incoming]) -> None:
    for target in targets:
        target.deliver()
