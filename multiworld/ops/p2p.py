"""Plans of sends and receives: argument checks, the buffer for the connection, and the call of c10d for NCCL."""

from torch import Tensor

from multiworld.ops.buffers import RecvBuffer, SendBuffer
from multiworld.ops.operation import Plan
from multiworld.ops.validation import Ranks, check_tag, tensor_signature


def send(ranks: Ranks, tensor: Tensor, dst: int, tag: int) -> Plan:
    """Plan a send of `tensor`, any shape and dtype, to rank `dst`. Raises ValueError or TypeError for invalid arguments."""
    ranks.check_peer("send", dst)
    check_tag("send", tag)
    on_host = ranks.on_host("send", (tensor,))
    source = SendBuffer(tensor, on_host)
    return Plan(
        name="send",
        signature=tensor_signature(tensor),
        post=lambda group: group.send([source.materialize()], dst, tag),
        tensors=(tensor,),
        staged=on_host,
        peer=dst,
        tag=tag,
        size_bytes=tensor.nbytes,
        buffer=source.materialize,
    )


def recv(ranks: Ranks, tensor: Tensor, src: int, tag: int) -> Plan:
    """Plan a receive from rank `src` into `tensor`, which has the sender's dtype and number of elements.

    Raises ValueError or TypeError for invalid arguments.
    """
    ranks.check_peer("recv", src)
    check_tag("recv", tag)
    on_host = ranks.on_host("recv", (tensor,))
    target = RecvBuffer("recv", tensor, on_host)
    return Plan(
        name="recv",
        signature=tensor_signature(tensor),
        post=lambda group: group.recv([target.materialize()], src, tag),
        copy_back=None if target.direct else target.copy_back,
        tensors=(tensor,),
        staged=on_host,
        peer=src,
        tag=tag,
        size_bytes=tensor.nbytes,
        buffer=target.materialize,
    )
