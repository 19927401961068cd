"""With `verify_collectives`, the members compare fingerprints of each collective before its data moves.

If members start different collectives, the results are wrong or the collectives never complete. With `verify_collectives`, each member
sends each other member a fingerprint of fixed length before every collective: the signature (`all_reduce(float32[12], SUM)`) and, for an
all-to-all, the number of bytes for the receiver. A mismatch breaks the world with cause `error`. This detects program errors. It does not
protect against a malicious member, which knows the secret of the world and can send any data. In all worlds, each message also carries
its own signature (multiworld/transport/wire.py).
"""

import struct
from collections import Counter

import torch
from torch import Tensor

from multiworld.collectives.channel import CollectiveChannel
from multiworld.collectives.transfers import wait_all
from multiworld.execution.failures import MismatchError
from multiworld.ops.operation import Collective
from multiworld.transport.wire import decode_signature, encode_signature

_SIGNATURE_BYTES = 96
_SIZE = struct.Struct("!Q")
"""Follows the signature: bytes that an all-to-all sends to the receiver of the fingerprint; 0 for other collectives."""
_FINGERPRINT = "fingerprint"
"""Names the messages that carry fingerprints."""


async def verify(channel: CollectiveChannel, collective: Collective) -> None:
    """Exchange and compare the fingerprints of a collective.

    Raises:
        MismatchError: all members raise the same one for a signature. Its rank is the first whose signature differs from the most
            frequent one; among equally frequent ones, that of the lowest rank counts. The receiver alone raises it for a size, with the
            rank of the sender.
        RuntimeError: a connection is lost.
        WorldError: the world has ended.
    """
    own = encode_signature(collective.signature, _SIGNATURE_BYTES)
    sent, expected = collective.splits_bytes or ([0] * channel.size, [0] * channel.size)
    received = {peer: bytearray(_SIGNATURE_BYTES + _SIZE.size) for peer in channel.peers}
    futures = [channel.receive(peer, _tensor(each), what=_FINGERPRINT) for peer, each in received.items()]
    for peer in channel.peers:
        futures.append(channel.send(peer, _tensor(bytearray(own + _SIZE.pack(sent[peer]))), what=_FINGERPRINT))
    await wait_all(futures)
    by_rank = {channel.rank: own, **{peer: bytes(each[:_SIGNATURE_BYTES]) for peer, each in received.items()}}
    signatures = [by_rank[rank] for rank in range(channel.size)]
    usual = max(signatures, key=Counter(signatures).__getitem__)  # the first of the most frequent
    for rank, signature in enumerate(signatures):
        if signature != usual:
            theirs, others = decode_signature(signature), decode_signature(usual)
            raise MismatchError(rank, f"it starts {theirs}, the other members start {others}")
    for peer, each in received.items():
        (size,) = _SIZE.unpack(each[_SIGNATURE_BYTES:])
        if size != expected[peer]:
            raise MismatchError(peer, f"all_to_all: it sends {size} bytes where {expected[peer]} are expected")


def _tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
