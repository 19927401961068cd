"""Sends and receives as plans: their arguments checked, and how they are handed to c10d."""

from torch import Tensor

from multiworld.arguments import Ranks, check_tag, described
from multiworld.buffers import Incoming, Outgoing, flat_bytes
from multiworld.operation import Plan


def send(ranks: Ranks, tensor: Tensor, dst: int, tag: int) -> Plan:
    ranks.peer("send", dst)
    check_tag("send", tag)
    on_host = ranks.on_host("send", (tensor,))
    source = Outgoing(tensor, on_host)
    return Plan(
        name="send",
        signature=described(tensor),
        post=lambda group: group.send([source.open()], dst, tag),
        tensors=(tensor,),
        staged=on_host,
        peer=dst,
        tag=tag,
        buffer=lambda: flat_bytes(source.open()),
    )


def recv(ranks: Ranks, tensor: Tensor, src: int, tag: int) -> Plan:
    ranks.peer("recv", src)
    check_tag("recv", tag)
    on_host = ranks.on_host("recv", (tensor,))
    target = Incoming("recv", tensor, on_host)
    return Plan(
        name="recv",
        signature=described(tensor),
        post=lambda group: group.recv([target.open()], src, tag),
        deliver=target.deliver,
        tensors=(tensor,),
        staged=on_host,
        peer=src,
        tag=tag,
        buffer=lambda: flat_bytes(target.open()),
    )
