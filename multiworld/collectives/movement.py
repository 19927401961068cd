"""The collectives that move data: argument checks, the algorithm for the connections, and the call of c10d for NCCL.

Data is sent as bytes, so every dtype is supported. All functions raise ValueError or TypeError for invalid arguments.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work

from multiworld.collectives import transfers
from multiworld.ops.buffers import RecvBuffer, check_distinct, contiguous, copy_back_of, flat_bytes
from multiworld.ops.operation import Algorithm, Collective
from multiworld.ops.validation import WorldFacts, check_list, check_whole, parts_of_root, tensor_signature

_Tensors = tuple[Sequence[Tensor], Sequence[int]]
"""Tensors of the caller, and the ranks that they go to or come from: one tensor for each rank, or one tensor for all these ranks."""
_Post = Callable[[ProcessGroup, list[Tensor], list[Tensor]], Work]
"""Hands a collective to NCCL, given the sent and the received tensors as bytes."""


def broadcast(facts: WorldFacts, tensor: Tensor, src: int) -> Collective:
    """Copy `tensor` of rank `src` into `tensor` of all other members. Same dtype and number of elements at all members."""
    facts.check_root("broadcast", src)
    staged = facts.check_devices("broadcast", (tensor,))
    own = [tensor]
    return _exchange(
        facts,
        f"broadcast({tensor_signature(tensor)}, src {src})",
        staged,
        sent=(own if facts.rank == src else (), range(facts.size)),
        received=(own if facts.rank != src else (), [src]),
        post=lambda group, sent, received: group.broadcast((sent or received)[0], src),
    )


def all_gather(facts: WorldFacts, tensors: Sequence[Tensor], tensor: Tensor) -> Collective:
    """Receive `tensor` of rank r into `tensors[r]`. All have the same dtype and number of elements."""
    staged = facts.check_devices("all_gather", (*tensors, tensor))
    check_list("all_gather", facts, tensors, tensor, written=True)
    return _exchange(
        facts,
        f"all_gather({tensor_signature(tensor)})",
        staged,
        sent=([tensor], range(facts.size)),
        received=(tensors, range(facts.size)),
        post=lambda group, sent, received: group.allgather(received, sent[0]),
    )


def all_gather_into_tensor(facts: WorldFacts, output: Tensor, tensor: Tensor) -> Collective:
    """Receive the tensors of all ranks, in rank order, into `output`: `facts.size` times the elements of `tensor`, same dtype."""
    staged = facts.check_devices("all_gather_into_tensor", (output, tensor))
    check_whole("all_gather_into_tensor", facts, output, tensor)
    return _exchange(
        facts,
        f"all_gather_into_tensor({tensor_signature(tensor)})",
        staged,
        sent=([tensor], range(facts.size)),
        received=([output], range(facts.size)),
        post=lambda group, sent, received: group._allgather_base(received[0], sent[0]),
    )


def gather(facts: WorldFacts, tensor: Tensor, gather_list: Sequence[Tensor] | None, dst: int) -> Collective:
    """Receive `tensor` of rank r into `gather_list[r]` at rank `dst`. Other ranks pass None."""
    facts.check_root("gather", dst)
    parts = parts_of_root("gather", facts, gather_list, dst, "gather_list")
    staged = facts.check_devices("gather", (*parts, tensor))
    if facts.rank == dst:
        check_list("gather", facts, parts, tensor, written=True)
    return _exchange(
        facts,
        f"gather({tensor_signature(tensor)}, dst {dst})",
        staged,
        sent=([tensor], [dst]),
        received=(parts, range(facts.size)),
        post=lambda group, sent, received: group.gather(received, sent[0], dst),
    )


def scatter(facts: WorldFacts, tensor: Tensor, scatter_list: Sequence[Tensor] | None, src: int) -> Collective:
    """Send `scatter_list[r]` of rank `src` into `tensor` at rank r. Other ranks pass None."""
    facts.check_root("scatter", src)
    parts = parts_of_root("scatter", facts, scatter_list, src, "scatter_list")
    staged = facts.check_devices("scatter", (*parts, tensor))
    if facts.rank == src:
        check_list("scatter", facts, parts, tensor, written=False)
    return _exchange(
        facts,
        f"scatter({tensor_signature(tensor)}, src {src})",
        staged,
        sent=(parts, range(facts.size)),
        received=([tensor], [src]),
        post=lambda group, sent, received: group.scatter(received[0], sent, src),
    )


def all_to_all(facts: WorldFacts, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Collective:
    """Send `inputs[r]` to rank r and receive from rank r into `outputs[r]`. One dtype; sizes may differ, but must match pairwise."""
    for tensors, what in ((outputs, "output"), (inputs, "input")):
        if len(tensors) != facts.size:
            raise ValueError(f"all_to_all: expected one {what} for each of the {facts.size} ranks, got {len(tensors)}")
    staged = facts.check_devices("all_to_all", (*outputs, *inputs))
    dtypes = {each.dtype for each in (*outputs, *inputs)}
    if len(dtypes) > 1:
        raise TypeError(f"all_to_all: all tensors must be of one dtype, got {sorted(map(str, dtypes))}")
    if outputs[facts.rank].numel() != inputs[facts.rank].numel():
        raise ValueError("all_to_all: the input and the output for the own rank must have the same number of elements")
    check_distinct("all_to_all", outputs)
    collective = _exchange(
        facts,
        f"all_to_all({str(inputs[0].dtype).removeprefix('torch.')})",
        staged,
        sent=(inputs, range(facts.size)),
        received=(outputs, range(facts.size)),
        post=lambda group, sent, received: group.alltoall(received, sent),
    )
    collective.splits_bytes = [each.nbytes for each in inputs], [each.nbytes for each in outputs]
    return collective


def _exchange(
    facts: WorldFacts, signature: str, staged: bool, *, sent: _Tensors, received: _Tensors, post: _Post
) -> Collective:
    """Return a collective that moves tensors between ranks.

    Args:
        sent: a single tensor is sent whole to each of its ranks.
        received: a single tensor consists of equal parts, one from each of its ranks.
    """
    (inputs, receivers), (outputs, senders) = sent, received
    targets = [RecvBuffer(signature.partition("(")[0], each, staged) for each in outputs]

    def load() -> tuple[list[Tensor], list[Tensor]]:
        incoming = [flat_bytes(target.materialize()) for target in targets]
        return [flat_bytes(contiguous(each, staged)) for each in inputs], incoming

    def algorithm() -> Algorithm:
        outgoing, incoming = load()
        if len(outgoing) == 1:
            outgoing *= len(receivers)
        if len(incoming) == 1:
            incoming = list(torch.tensor_split(incoming[0], len(senders)))
        by_receiver = dict(zip(receivers, outgoing, strict=False))  # without tensors there is nothing to send
        by_sender = dict(zip(senders, incoming, strict=False))
        return lambda channel: transfers.exchange(channel, by_receiver, by_sender)

    tensors = (*inputs, *outputs)
    return Collective(
        signature=signature,
        algorithm=algorithm,
        post=(lambda group: post(group, *load())) if facts.uses_nccl(tensors[0]) else None,
        copy_back=copy_back_of(targets),
        tensors=tensors,
        staged=staged,
    )
