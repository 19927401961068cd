"""Plans of the collectives that move data: argument checks, the script for the connections, and the call of c10d.

Data is sent as bytes, so every dtype is supported. All functions raise ValueError or TypeError for invalid arguments.
"""

from collections.abc import Callable, Sequence

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

from multiworld.collectives import transfers
from multiworld.execution.process_group import FOREVER
from multiworld.ops.buffers import RecvBuffer, SendBuffer, flat_bytes
from multiworld.ops.operation import Plan, Script
from multiworld.ops.validation import Ranks, check_distinct, check_list, check_whole, described, parts_of_root


def broadcast(ranks: Ranks, tensor: Tensor, src: int) -> Plan:
    """Copy `tensor` of rank `src` into `tensor` of all other members. Same dtype and number of elements at all members."""
    ranks.root("broadcast", src)
    on_host = ranks.on_host("broadcast", (tensor,))
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = src, 0, FOREVER
    source = SendBuffer(tensor, on_host) if ranks.rank == src else None
    target = RecvBuffer("broadcast", tensor, on_host) if source is None else None

    def data() -> Tensor:
        opened = source.open() if source is not None else target.open() if target is not None else None
        assert opened is not None
        return flat_bytes(opened)

    def script() -> Script:
        moved = data()
        return lambda exchange: transfers.broadcast(exchange, moved, src)

    return Plan(
        name="broadcast",
        signature=f"broadcast({described(tensor)}, src {src})",
        post=lambda group: group.broadcast([data()], options),
        script=script if ranks.over_lines(tensor) else None,
        deliver=_delivery([target] if target is not None else []),
        tensors=(tensor,),
        staged=on_host,
    )


def all_gather(ranks: Ranks, tensors: Sequence[Tensor], tensor: Tensor) -> Plan:
    """Receive `tensor` of rank r into `tensors[r]`. All have the same dtype and number of elements."""
    on_host = ranks.on_host("all_gather", (*tensors, tensor))
    check_list("all_gather", ranks, tensors, tensor, written=True)
    source = SendBuffer(tensor, on_host)
    targets = [RecvBuffer("all_gather", each, on_host) for each in tensors]
    options = AllgatherOptions()
    options.timeout = FOREVER

    def script() -> Script:
        own, parts = flat_bytes(source.open()), [flat_bytes(target.open()) for target in targets]
        return lambda exchange: transfers.transfer(
            exchange, dict.fromkeys(range(ranks.size), own), dict(enumerate(parts))
        )

    return Plan(
        name="all_gather",
        signature=f"all_gather({described(tensor)})",
        post=lambda group: group.allgather(
            [[flat_bytes(target.open()) for target in targets]], [flat_bytes(source.open())], options
        ),
        script=script if ranks.over_lines(tensor) else None,
        deliver=_delivery(targets),
        tensors=(*tensors, tensor),
        staged=on_host,
    )


def all_gather_into_tensor(ranks: Ranks, output: Tensor, tensor: Tensor) -> Plan:
    """Receive the tensors of all ranks, in rank order, into `output`: `ranks.size` times the elements of `tensor`, same dtype."""
    on_host = ranks.on_host("all_gather_into_tensor", (output, tensor))
    check_whole("all_gather_into_tensor", ranks, output, tensor)
    source, target = SendBuffer(tensor, on_host), RecvBuffer("all_gather_into_tensor", output, on_host)
    options = AllgatherOptions()
    options.timeout = FOREVER

    def script() -> Script:
        own, parts = flat_bytes(source.open()), torch.tensor_split(flat_bytes(target.open()), ranks.size)
        return lambda exchange: transfers.transfer(
            exchange, dict.fromkeys(range(ranks.size), own), dict(enumerate(parts))
        )

    return Plan(
        name="all_gather_into_tensor",
        signature=f"all_gather_into_tensor({described(tensor)})",
        post=lambda group: group._allgather_base(flat_bytes(target.open()), flat_bytes(source.open()), options),
        script=script if ranks.over_lines(tensor) else None,
        deliver=_delivery([target]),
        tensors=(output, tensor),
        staged=on_host,
    )


def gather(ranks: Ranks, tensor: Tensor, gather_list: Sequence[Tensor] | None, dst: int) -> Plan:
    """Receive `tensor` of rank r into `gather_list[r]` at rank `dst`. Other ranks pass None."""
    ranks.root("gather", dst)
    parts = parts_of_root("gather", ranks, gather_list, dst, "gather_list")
    on_host = ranks.on_host("gather", (*parts, tensor))
    if ranks.rank == dst:
        check_list("gather", ranks, parts, tensor, written=True)
    source = SendBuffer(tensor, on_host)
    targets = [RecvBuffer("gather", each, on_host) for each in parts]
    options = GatherOptions()
    options.rootRank, options.timeout = dst, FOREVER

    def post(group: ProcessGroup) -> Work:
        outputs = [[flat_bytes(target.open()) for target in targets]] if targets else []
        return group.gather(outputs, [flat_bytes(source.open())], options)

    def script() -> Script:
        own, received = flat_bytes(source.open()), {rank: flat_bytes(each.open()) for rank, each in enumerate(targets)}
        return lambda exchange: transfers.transfer(exchange, {dst: own}, received)

    return Plan(
        name="gather",
        signature=f"gather({described(tensor)}, dst {dst})",
        post=post,
        script=script if ranks.over_lines(tensor) else None,
        deliver=_delivery(targets),
        tensors=(*parts, tensor),
        staged=on_host,
    )


def scatter(ranks: Ranks, tensor: Tensor, scatter_list: Sequence[Tensor] | None, src: int) -> Plan:
    """Send `scatter_list[r]` of rank `src` into `tensor` at rank r. Other ranks pass None."""
    ranks.root("scatter", src)
    parts = parts_of_root("scatter", ranks, scatter_list, src, "scatter_list")
    on_host = ranks.on_host("scatter", (*parts, tensor))
    if ranks.rank == src:
        check_list("scatter", ranks, parts, tensor, written=False)
    sources = [SendBuffer(each, on_host) for each in parts]
    target = RecvBuffer("scatter", tensor, on_host)
    options = ScatterOptions()
    options.rootRank, options.timeout = src, FOREVER

    def post(group: ProcessGroup) -> Work:
        inputs = [[flat_bytes(source.open()) for source in sources]] if sources else []
        return group.scatter([flat_bytes(target.open())], inputs, options)

    def script() -> Script:
        own, sent = flat_bytes(target.open()), {rank: flat_bytes(each.open()) for rank, each in enumerate(sources)}
        return lambda exchange: transfers.transfer(exchange, sent, {src: own})

    return Plan(
        name="scatter",
        signature=f"scatter({described(tensor)}, src {src})",
        post=post,
        script=script if ranks.over_lines(tensor) else None,
        deliver=_delivery([target]),
        tensors=(*parts, tensor),
        staged=on_host,
    )


def all_to_all(ranks: Ranks, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Plan:
    """Send `inputs[r]` to rank r and receive from rank r into `outputs[r]`. One dtype; sizes may differ, but must match pairwise."""
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
    sources = [SendBuffer(each, on_host) for each in inputs]
    targets = [RecvBuffer("all_to_all", each, on_host) for each in outputs]
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
        for target in targets:
            target.deliver()

    def script() -> Script:
        outgoing = {rank: flat_bytes(each.open()) for rank, each in enumerate(sources)}
        incoming = {rank: flat_bytes(each.open()) for rank, each in enumerate(targets)}
        return lambda exchange: transfers.transfer(exchange, outgoing, incoming)

    over_lines = ranks.over_lines(inputs[0])
    return Plan(
        name="all_to_all",
        signature=f"all_to_all({str(dtype).removeprefix('torch.')})",
        post=post,
        script=script if over_lines else None,
        deliver=_delivery(targets) if over_lines else deliver,
        tensors=(*outputs, *inputs),
        staged=on_host,
        splits_bytes=(sent, expected),
    )


def _delivery(targets: list[RecvBuffer]) -> Callable[[], None] | None:
    """A function that delivers the buffers that are not written directly; None if there are none."""
    indirect = [target for target in targets if not target.direct]

    def deliver() -> None:
        for target in indirect:
            target.deliver()

    return deliver if indirect else None
