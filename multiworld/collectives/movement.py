"""The collectives that move data: argument checks, the algorithm for the connections, and the call of c10d for NCCL.

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
from multiworld.ops.operation import Algorithm, Collective, Post
from multiworld.ops.validation import Ranks, check_distinct, check_list, check_whole, parts_of_root, tensor_signature

_ByRank = Callable[[], Mapping[int, Tensor]]
"""Returns the materialized buffers by rank, as bytes."""


def broadcast(ranks: Ranks, tensor: Tensor, src: int) -> Collective:
    """Copy `tensor` of rank `src` into `tensor` of all other members. Same dtype and number of elements at all members."""
    ranks.check_root("broadcast", src)
    staged = ranks.check_devices("broadcast", (tensor,))
    targets = [RecvBuffer("broadcast", tensor, staged)] if ranks.rank != src else []
    buffer = targets[0] if targets else SendBuffer(tensor, staged)
    options = without_timeout(BroadcastOptions(), rootRank=src, rootTensor=0)
    return _exchange(
        ranks,
        f"broadcast({tensor_signature(tensor)}, src {src})",
        (tensor,),
        sent=dict if targets else _to_all(ranks, buffer),
        received=lambda: {src: flat_bytes(buffer.materialize())} if targets else {},
        post=lambda group: group.broadcast([flat_bytes(buffer.materialize())], options),
        targets=targets,
        staged=staged,
    )


def all_gather(ranks: Ranks, tensors: Sequence[Tensor], tensor: Tensor) -> Collective:
    """Receive `tensor` of rank r into `tensors[r]`. All have the same dtype and number of elements."""
    staged = ranks.check_devices("all_gather", (*tensors, tensor))
    check_list("all_gather", ranks, tensors, tensor, written=True)
    source = SendBuffer(tensor, staged)
    targets = [RecvBuffer("all_gather", each, staged) for each in tensors]
    options = without_timeout(AllgatherOptions())
    return _exchange(
        ranks,
        f"all_gather({tensor_signature(tensor)})",
        (*tensors, tensor),
        sent=_to_all(ranks, source),
        received=lambda: dict(enumerate(_bytes(targets))),
        post=lambda group: group.allgather([_bytes(targets)], _bytes([source]), options),
        targets=targets,
        staged=staged,
    )


def all_gather_into_tensor(ranks: Ranks, output: Tensor, tensor: Tensor) -> Collective:
    """Receive the tensors of all ranks, in rank order, into `output`: `ranks.size` times the elements of `tensor`, same dtype."""
    staged = ranks.check_devices("all_gather_into_tensor", (output, tensor))
    check_whole("all_gather_into_tensor", ranks, output, tensor)
    source, target = SendBuffer(tensor, staged), RecvBuffer("all_gather_into_tensor", output, staged)
    options = without_timeout(AllgatherOptions())
    return _exchange(
        ranks,
        f"all_gather_into_tensor({tensor_signature(tensor)})",
        (output, tensor),
        sent=_to_all(ranks, source),
        received=lambda: dict(enumerate(torch.tensor_split(flat_bytes(target.materialize()), ranks.size))),
        post=lambda group: group._allgather_base(
            flat_bytes(target.materialize()), flat_bytes(source.materialize()), options
        ),
        targets=[target],
        staged=staged,
    )


def gather(ranks: Ranks, tensor: Tensor, gather_list: Sequence[Tensor] | None, dst: int) -> Collective:
    """Receive `tensor` of rank r into `gather_list[r]` at rank `dst`. Other ranks pass None."""
    ranks.check_root("gather", dst)
    parts = parts_of_root("gather", ranks, gather_list, dst, "gather_list")
    staged = ranks.check_devices("gather", (*parts, tensor))
    if ranks.rank == dst:
        check_list("gather", ranks, parts, tensor, written=True)
    source = SendBuffer(tensor, staged)
    targets = [RecvBuffer("gather", each, staged) for each in parts]
    options = without_timeout(GatherOptions(), rootRank=dst)
    return _exchange(
        ranks,
        f"gather({tensor_signature(tensor)}, dst {dst})",
        (*parts, tensor),
        sent=lambda: {dst: flat_bytes(source.materialize())},
        received=lambda: dict(enumerate(_bytes(targets))),
        post=lambda group: group.gather([_bytes(targets)] if targets else [], _bytes([source]), options),
        targets=targets,
        staged=staged,
    )


def scatter(ranks: Ranks, tensor: Tensor, scatter_list: Sequence[Tensor] | None, src: int) -> Collective:
    """Send `scatter_list[r]` of rank `src` into `tensor` at rank r. Other ranks pass None."""
    ranks.check_root("scatter", src)
    parts = parts_of_root("scatter", ranks, scatter_list, src, "scatter_list")
    staged = ranks.check_devices("scatter", (*parts, tensor))
    if ranks.rank == src:
        check_list("scatter", ranks, parts, tensor, written=False)
    sources = [SendBuffer(each, staged) for each in parts]
    target = RecvBuffer("scatter", tensor, staged)
    options = without_timeout(ScatterOptions(), rootRank=src)
    return _exchange(
        ranks,
        f"scatter({tensor_signature(tensor)}, src {src})",
        (*parts, tensor),
        sent=lambda: dict(enumerate(_bytes(sources))),
        received=lambda: {src: flat_bytes(target.materialize())},
        post=lambda group: group.scatter(_bytes([target]), [_bytes(sources)] if sources else [], options),
        targets=[target],
        staged=staged,
    )


def all_to_all(ranks: Ranks, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Collective:
    """Send `inputs[r]` to rank r and receive from rank r into `outputs[r]`. One dtype; sizes may differ, but must match pairwise."""
    for tensors, what in ((outputs, "output"), (inputs, "input")):
        if len(tensors) != ranks.size:
            raise ValueError(f"all_to_all: expected one {what} for each of the {ranks.size} ranks, got {len(tensors)}")
    staged = ranks.check_devices("all_to_all", (*outputs, *inputs))
    dtypes = {each.dtype for each in (*outputs, *inputs)}
    if len(dtypes) > 1:
        raise TypeError(f"all_to_all: all tensors must be of one dtype, got {sorted(map(str, dtypes))}")
    if outputs[ranks.rank].numel() != inputs[ranks.rank].numel():
        raise ValueError("all_to_all: the input and the output for the own rank must have the same number of elements")
    check_distinct("all_to_all", outputs)
    sources = [SendBuffer(each, staged) for each in inputs]
    targets = [RecvBuffer("all_to_all", each, staged) for each in outputs]

    def post(group: ProcessGroup) -> Work:
        return group.alltoall(_bytes(targets), _bytes(sources), without_timeout(AllToAllOptions()))

    collective = _exchange(
        ranks,
        f"all_to_all({str(inputs[0].dtype).removeprefix('torch.')})",
        (*outputs, *inputs),
        sent=lambda: dict(enumerate(_bytes(sources))),
        received=lambda: dict(enumerate(_bytes(targets))),
        post=post,
        targets=targets,
        staged=staged,
    )
    collective.splits_bytes = [each.nbytes for each in inputs], [each.nbytes for each in outputs]
    return collective


def _exchange(
    ranks: Ranks,
    signature: str,
    tensors: tuple[Tensor, ...],
    *,
    sent: _ByRank,
    received: _ByRank,
    post: Post,
    targets: list[RecvBuffer],
    staged: bool,
) -> Collective:
    """A collective that sends each rank its tensor of `sent` and receives into `received`, or that NCCL runs with `post`."""

    def algorithm() -> Algorithm:
        outgoing, incoming = sent(), received()
        return lambda channel: transfers.exchange(channel, outgoing, incoming)

    own = ranks.uses_own_connections(tensors[0])
    return Collective(
        name=signature.partition("(")[0],
        signature=signature,
        algorithm=algorithm if own else None,
        post=None if own else post,
        copy_back=_copy_back(targets),
        tensors=tensors,
        staged=staged,
    )


def _bytes(buffers: Sequence[SendBuffer | RecvBuffer]) -> list[Tensor]:
    return [flat_bytes(buffer.materialize()) for buffer in buffers]


def _to_all(ranks: Ranks, source: SendBuffer | RecvBuffer) -> _ByRank:
    return lambda: dict.fromkeys(range(ranks.size), flat_bytes(source.materialize()))


def _copy_back(targets: list[RecvBuffer]) -> Callable[[], None] | None:
    """`Collective.copy_back` for buffers that are not written directly; None if there are none."""
    indirect = [target for target in targets if not target.direct]

    def copy_back() -> None:
        for target in indirect:
            target.copy_back()

    return copy_back if indirect else None
