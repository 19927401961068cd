"""Plans of the collectives that move data: argument checks, the algorithm for the connections, and the call of c10d.

Data is sent as bytes, so every dtype is supported. All functions raise ValueError or TypeError for invalid arguments.
"""

from collections.abc import Callable, Mapping, Sequence

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
from multiworld.execution.process_group import without_timeout
from multiworld.ops.buffers import RecvBuffer, SendBuffer, flat_bytes
from multiworld.ops.operation import Algorithm, Plan
from multiworld.ops.validation import Ranks, check_distinct, check_list, check_whole, parts_of_root, tensor_signature

_ByRank = Callable[[], Mapping[int, Tensor]]
"""Returns the materialized buffers by rank, as bytes."""


def broadcast(ranks: Ranks, tensor: Tensor, src: int) -> Plan:
    """Copy `tensor` of rank `src` into `tensor` of all other members. Same dtype and number of elements at all members."""
    ranks.check_root("broadcast", src)
    on_host = ranks.on_host("broadcast", (tensor,))
    options = without_timeout(BroadcastOptions(), rootRank=src, rootTensor=0)
    target = RecvBuffer("broadcast", tensor, on_host) if ranks.rank != src else None
    buffer = target or SendBuffer(tensor, on_host)

    def algorithm() -> Algorithm:
        data = flat_bytes(buffer.materialize())
        return lambda channel: transfers.broadcast(channel, data, src)

    return Plan(
        name="broadcast",
        signature=f"broadcast({tensor_signature(tensor)}, src {src})",
        post=lambda group: group.broadcast([flat_bytes(buffer.materialize())], options),
        algorithm=algorithm if ranks.uses_tcp(tensor) else None,
        copy_back=_copy_back([target] if target is not None else []),
        tensors=(tensor,),
        staged=on_host,
    )


def all_gather(ranks: Ranks, tensors: Sequence[Tensor], tensor: Tensor) -> Plan:
    """Receive `tensor` of rank r into `tensors[r]`. All have the same dtype and number of elements."""
    on_host = ranks.on_host("all_gather", (*tensors, tensor))
    check_list("all_gather", ranks, tensors, tensor, written=True)
    source = SendBuffer(tensor, on_host)
    targets = [RecvBuffer("all_gather", each, on_host) for each in tensors]
    options = without_timeout(AllgatherOptions())
    return Plan(
        name="all_gather",
        signature=f"all_gather({tensor_signature(tensor)})",
        post=lambda group: group.allgather([_bytes(targets)], _bytes([source]), options),
        algorithm=_exchange(ranks, tensor, _to_all(ranks, source), lambda: dict(enumerate(_bytes(targets)))),
        copy_back=_copy_back(targets),
        tensors=(*tensors, tensor),
        staged=on_host,
    )


def all_gather_into_tensor(ranks: Ranks, output: Tensor, tensor: Tensor) -> Plan:
    """Receive the tensors of all ranks, in rank order, into `output`: `ranks.size` times the elements of `tensor`, same dtype."""
    on_host = ranks.on_host("all_gather_into_tensor", (output, tensor))
    check_whole("all_gather_into_tensor", ranks, output, tensor)
    source, target = SendBuffer(tensor, on_host), RecvBuffer("all_gather_into_tensor", output, on_host)
    options = without_timeout(AllgatherOptions())

    def received() -> Mapping[int, Tensor]:
        return dict(enumerate(torch.tensor_split(flat_bytes(target.materialize()), ranks.size)))

    return Plan(
        name="all_gather_into_tensor",
        signature=f"all_gather_into_tensor({tensor_signature(tensor)})",
        post=lambda group: group._allgather_base(
            flat_bytes(target.materialize()), flat_bytes(source.materialize()), options
        ),
        algorithm=_exchange(ranks, tensor, _to_all(ranks, source), received),
        copy_back=_copy_back([target]),
        tensors=(output, tensor),
        staged=on_host,
    )


def gather(ranks: Ranks, tensor: Tensor, gather_list: Sequence[Tensor] | None, dst: int) -> Plan:
    """Receive `tensor` of rank r into `gather_list[r]` at rank `dst`. Other ranks pass None."""
    ranks.check_root("gather", dst)
    parts = parts_of_root("gather", ranks, gather_list, dst, "gather_list")
    on_host = ranks.on_host("gather", (*parts, tensor))
    if ranks.rank == dst:
        check_list("gather", ranks, parts, tensor, written=True)
    source = SendBuffer(tensor, on_host)
    targets = [RecvBuffer("gather", each, on_host) for each in parts]
    options = without_timeout(GatherOptions(), rootRank=dst)

    def sent() -> Mapping[int, Tensor]:
        return {dst: flat_bytes(source.materialize())}

    return Plan(
        name="gather",
        signature=f"gather({tensor_signature(tensor)}, dst {dst})",
        post=lambda group: group.gather([_bytes(targets)] if targets else [], _bytes([source]), options),
        algorithm=_exchange(ranks, tensor, sent, lambda: dict(enumerate(_bytes(targets)))),
        copy_back=_copy_back(targets),
        tensors=(*parts, tensor),
        staged=on_host,
    )


def scatter(ranks: Ranks, tensor: Tensor, scatter_list: Sequence[Tensor] | None, src: int) -> Plan:
    """Send `scatter_list[r]` of rank `src` into `tensor` at rank r. Other ranks pass None."""
    ranks.check_root("scatter", src)
    parts = parts_of_root("scatter", ranks, scatter_list, src, "scatter_list")
    on_host = ranks.on_host("scatter", (*parts, tensor))
    if ranks.rank == src:
        check_list("scatter", ranks, parts, tensor, written=False)
    sources = [SendBuffer(each, on_host) for each in parts]
    target = RecvBuffer("scatter", tensor, on_host)
    options = without_timeout(ScatterOptions(), rootRank=src)

    def received() -> Mapping[int, Tensor]:
        return {src: flat_bytes(target.materialize())}

    return Plan(
        name="scatter",
        signature=f"scatter({tensor_signature(tensor)}, src {src})",
        post=lambda group: group.scatter(_bytes([target]), [_bytes(sources)] if sources else [], options),
        algorithm=_exchange(ranks, tensor, lambda: dict(enumerate(_bytes(sources))), received),
        copy_back=_copy_back([target]),
        tensors=(*parts, tensor),
        staged=on_host,
    )


def all_to_all(ranks: Ranks, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Plan:
    """Send `inputs[r]` to rank r and receive from rank r into `outputs[r]`. One dtype; sizes may differ, but must match pairwise."""
    for tensors, what in ((outputs, "output"), (inputs, "input")):
        if len(tensors) != ranks.size:
            raise ValueError(f"all_to_all: expected one {what} for each of the {ranks.size} ranks, got {len(tensors)}")
    on_host = ranks.on_host("all_to_all", (*outputs, *inputs))
    dtypes = {each.dtype for each in (*outputs, *inputs)}
    if len(dtypes) > 1:
        raise TypeError(f"all_to_all: all tensors must be of one dtype, got {sorted(map(str, dtypes))}")
    if outputs[ranks.rank].numel() != inputs[ranks.rank].numel():
        raise ValueError("all_to_all: the input and the output for the own rank must have the same number of elements")
    check_distinct("all_to_all", outputs)
    sources = [SendBuffer(each, on_host) for each in inputs]
    targets = [RecvBuffer("all_to_all", each, on_host) for each in outputs]
    sent, expected = [each.nbytes for each in inputs], [each.nbytes for each in outputs]
    options = without_timeout(AllToAllOptions())
    received: list[Tensor] = []

    def post(group: ProcessGroup) -> Work:
        data = torch.cat(_bytes(sources))
        received.append(torch.empty(sum(expected), dtype=torch.uint8, device=data.device))
        return group.alltoall_base(received[0], data, expected, sent, options)

    def copy_back() -> None:
        with torch.inference_mode():
            for target, part in zip(_bytes(targets), received.pop().split_with_sizes(expected), strict=True):
                target.copy_(part)
        for buffer in targets:
            buffer.copy_back()

    return Plan(
        name="all_to_all",
        signature=f"all_to_all({str(inputs[0].dtype).removeprefix('torch.')})",
        post=post,
        algorithm=_exchange(
            ranks, inputs[0], lambda: dict(enumerate(_bytes(sources))), lambda: dict(enumerate(_bytes(targets)))
        ),
        copy_back=_copy_back(targets) if ranks.uses_tcp(inputs[0]) else copy_back,
        tensors=(*outputs, *inputs),
        staged=on_host,
        splits_bytes=(sent, expected),
    )


def _bytes(buffers: Sequence[SendBuffer | RecvBuffer]) -> list[Tensor]:
    return [flat_bytes(buffer.materialize()) for buffer in buffers]


def _to_all(ranks: Ranks, source: SendBuffer) -> _ByRank:
    return lambda: dict.fromkeys(range(ranks.size), flat_bytes(source.materialize()))


def _exchange(ranks: Ranks, tensor: Tensor, sent: _ByRank, received: _ByRank) -> Callable[[], Algorithm] | None:
    """`Plan.algorithm` that sends each rank its tensor of `sent` and receives into `received`; None if c10d runs the collective."""

    def algorithm() -> Algorithm:
        outgoing, incoming = sent(), received()
        return lambda channel: transfers.exchange(channel, outgoing, incoming)

    return algorithm if ranks.uses_tcp(tensor) else None


def _copy_back(targets: list[RecvBuffer]) -> Callable[[], None] | None:
    """`Plan.copy_back` for buffers that are not written directly; None if there are none."""
    indirect = [target for target in targets if not target.direct]

    def copy_back() -> None:
        for target in indirect:
            target.copy_back()

    return copy_back if indirect else None
