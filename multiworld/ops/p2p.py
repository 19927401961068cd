"""Sends and receives: argument checks, and the buffer for the connection.

NCCL carries no messages: it has no tags, and two members that both send first would block each other.

The receiver of a tensor knows its size. The receiver of a *message* does not know it before the message arrives: the sender adds a header
of its own format, which travels in the head of the message in place of the signature. The receiver checks header and size before it
provides memory, so one message needs one transfer, and a peer cannot choose how much memory is allocated.
"""

import torch
from torch import Tensor

from multiworld.ops.buffers import RecvBuffer, contiguous
from multiworld.ops.operation import Receive, Send, View
from multiworld.ops.validation import WorldFacts, tensor_signature

MAX_HEADER_BYTES = 48


def send(facts: WorldFacts, tensor: Tensor, dst: int, tag: int) -> Send:
    """Return a send of `tensor`, any shape and dtype, to rank `dst`. Raises ValueError or TypeError for invalid arguments."""
    facts.check_peer("send", dst, tag)
    staged = facts.check_devices("send", (tensor,)) or facts.uses_nccl(tensor)
    operation = Send(signature=tensor_signature(tensor), tensors=(tensor,), staged=staged, peer=dst, tag=tag)
    if not staged:
        operation.set_data(contiguous(tensor, on_host=False))
    return operation


def recv(facts: WorldFacts, tensor: Tensor, src: int, tag: int) -> Receive:
    """Return a receive from rank `src` into `tensor`, which has the sender's dtype and number of elements.

    Raises ValueError or TypeError for invalid arguments.
    """
    facts.check_peer("recv", src, tag)
    staged = facts.check_devices("recv", (tensor,)) or facts.uses_nccl(tensor)
    target = RecvBuffer("recv", tensor, staged)
    operation = Receive(
        signature=tensor_signature(tensor),
        copy_back=None if target.direct else target.copy_back,
        tensors=(tensor,),
        staged=staged,
        peer=src,
        tag=tag,
    )
    operation.set_data(target.materialize())
    return operation


def send_message(facts: WorldFacts, header: bytes, payload: Tensor | None, dst: int, tag: int) -> Send:
    """Return a send of `header`, at most MAX_HEADER_BYTES long, and `payload`, a tensor on the CPU or None, to rank `dst`.

    Raises ValueError or TypeError for invalid arguments.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"send_message: the header has {len(header)} bytes; expected at most {MAX_HEADER_BYTES}")
    if payload is not None and payload.device.type != "cpu":
        raise ValueError(f"send_message: the payload is on {payload.device}; move it to the CPU")
    operation = send(facts, torch.empty(0, dtype=torch.uint8) if payload is None else payload, dst, tag)
    operation.header = header
    return operation


def recv_view(facts: WorldFacts, view: View, src: int, tag: int) -> Receive:
    """Return a receive of a message of `send_message` from rank `src` into `view`. Raises ValueError for invalid arguments."""
    facts.check_peer("recv_view", src, tag)
    return Receive(signature="", peer=src, tag=tag, view=view)
