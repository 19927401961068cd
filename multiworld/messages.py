"""Sends and receives as plans: their arguments checked, the memory that a line carries, and how NCCL takes them."""

from torch import Tensor

from multiworld.arguments import Ranks, check_tag, described
from multiworld.buffers import Incoming, Outgoing
from multiworld.operation import Plan


def send(ranks: Ranks, tensor: Tensor, dst: int, tag: int) -> Plan:
    ranks.peer("send", dst)
    check_tag("send", tag)
    on_host = ranks.message_on_host("send", tensor)
    source = Outgoing(tensor, on_host)
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
    ranks.peer("recv", src)
    check_tag("recv", tag)
    on_host = ranks.message_on_host("recv", tensor)
    target = Incoming("recv", tensor, on_host)
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
