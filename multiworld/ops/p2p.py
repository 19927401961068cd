"""Plans of sends and receives: argument checks, the buffer for a connection, and the call of c10d that NCCL needs."""

from torch import Tensor

from multiworld.ops.buffers import RecvBuffer, SendBuffer
from multiworld.ops.operation import Plan
from multiworld.ops.validation import Ranks, check_tag, described


def send(ranks: Ranks, tensor: Tensor, dst: int, tag: int) -> Plan:
    """Plan a send of `tensor`, any shape and dtype, to rank `dst`. Raises ValueError or TypeError for invalid arguments."""
    ranks.peer("send", dst)
    check_tag("send", tag)
    on_host = ranks.on_host("send", (tensor,))
    source = SendBuffer(tensor, on_host)
    return Plan(
        name="send",
        signature=described(tensor),
        post=lambda group: group.send([source.open()], dst, tag),
        tensors=(tensor,),
        staged=on_host,
        peer=dst,
        tag=tag,
        size_bytes=tensor.nbytes,
        buffer=source.open,
    )


def recv(ranks: Ranks, tensor: Tensor, src: int, tag: int) -> Plan:
    """Plan a receive from rank `src` into `tensor`, which has the sender's dtype and number of elements.

    Raises ValueError or TypeError for invalid arguments.
    """
    ranks.peer("recv", src)
    check_tag("recv", tag)
    on_host = ranks.on_host("recv", (tensor,))
    target = RecvBuffer("recv", tensor, on_host)
    return Plan(
        name="recv",
        signature=described(tensor),
        post=lambda group: group.recv([target.open()], src, tag),
        deliver=None if target.direct else target.deliver,
        tensors=(tensor,),
        staged=on_host,
        peer=src,
        tag=tag,
        size_bytes=tensor.nbytes,
        buffer=target.open,
    )
