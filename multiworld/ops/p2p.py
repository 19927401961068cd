"""Sends and receives of tensors: argument checks, the buffer for the connection, and the call of c10d for NCCL."""

from functools import partial

from torch import Tensor

from multiworld.ops.buffers import RecvBuffer, contiguous
from multiworld.ops.operation import Receive, Send
from multiworld.ops.validation import Ranks, check_tag, tensor_signature


def send(ranks: Ranks, tensor: Tensor, dst: int, tag: int) -> Send:
    """A send of `tensor`, any shape and dtype, to rank `dst`. Raises ValueError or TypeError for invalid arguments."""
    ranks.check_peer("send", dst)
    check_tag("send", tag)
    staged = ranks.check_devices("send", (tensor,))
    buffer = partial(contiguous, tensor, staged)
    return Send(
        signature=tensor_signature(tensor),
        post=(lambda group: group.send([buffer()], dst, tag)) if ranks.uses_nccl(tensor) else None,
        tensors=(tensor,),
        staged=staged,
        peer=dst,
        tag=tag,
        size_bytes=tensor.nbytes,
        buffer=buffer,
    )


def recv(ranks: Ranks, tensor: Tensor, src: int, tag: int) -> Receive:
    """A receive from rank `src` into `tensor`, which has the sender's dtype and number of elements.

    Raises ValueError or TypeError for invalid arguments.
    """
    ranks.check_peer("recv", src)
    check_tag("recv", tag)
    staged = ranks.check_devices("recv", (tensor,))
    target = RecvBuffer("recv", tensor, staged)
    return Receive(
        signature=tensor_signature(tensor),
        post=(lambda group: group.recv([target.materialize()], src, tag)) if ranks.uses_nccl(tensor) else None,
        copy_back=None if target.direct else target.copy_back,
        tensors=(tensor,),
        staged=staged,
        peer=src,
        tag=tag,
        buffer=target.materialize,
    )
