"""With `verify_collectives`, the members compare fingerprints of each collective before its data moves.

If members start different collectives, the results are wrong or the collectives never complete. With `verify_collectives`, each member
sends each other member a fingerprint of fixed length before every collective: the signature (`all_reduce(float32[12], SUM)`) and, for an
all-to-all, the number of bytes for the receiver. A mismatch breaks the world with cause `error`. This detects program errors. It does not
protect against a malicious member, which knows the secret of the world and can send any data. In all worlds, each message also carries
its own signature (multiworld/transport/wire.py).
"""

import struct
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from multiworld.collectives.channel import CollectiveChannel
from multiworld.ops.operation import Collective
from multiworld.transport.wire import decode_signature, encode_signature

_SIGNATURE_BYTES = 96
_SIZE = struct.Struct("!Q")
"""Follows the signature: bytes that an all-to-all sends to the receiver of the fingerprint; 0 for other collectives."""
_FINGERPRINT = "fingerprint"
"""The signature of the messages that carry fingerprints."""


class Mismatch(NamedTuple):
    """A difference between the fingerprints of the members.

    Attributes:
        rank: the first rank whose signature differs from the most frequent one (among equally frequent ones, that of the lowest rank
            counts); for a size mismatch, the sender.
        detail: both sides of the mismatch as text.
    """

    rank: int
    detail: str


class CollectiveFingerprint:
    """Exchanges and compares the fingerprints of one collective.

    Args:
        on_compared: called once with the mismatch or None, under the world's lock, when all fingerprints are received and the own one is
            sent.
    """

    def __init__(
        self, channel: CollectiveChannel, plan: Collective, on_compared: Callable[[Mismatch | None], object]
    ) -> None:
        self._channel = channel
        self._own = encode_signature(plan.signature, _SIGNATURE_BYTES)
        self._sent, self._expected = plan.splits_bytes or ([0] * channel.size, [0] * channel.size)
        self._received = {peer: bytearray(_SIGNATURE_BYTES + _SIZE.size) for peer in channel.peers}
        self._remaining = 2 * len(channel.peers)
        self._on_compared = on_compared

    def begin(self) -> None:
        """Post all sends and receives. Raises RuntimeError when a connection is lost, WorldError when the world has ended."""
        for peer, received in self._received.items():
            self._channel.post_receive(peer, _tensor(received), _FINGERPRINT, self._on_transferred)
        for peer in self._received:
            own = _tensor(bytearray(self._own + _SIZE.pack(self._sent[peer])))
            self._channel.post_send(peer, own, _FINGERPRINT, self._on_transferred)

    def _on_transferred(self) -> None:
        self._remaining -= 1
        if not self._remaining:
            self._on_compared(self._find_mismatch())

    def _find_mismatch(self) -> Mismatch | None:
        """The first mismatch, or None. All members find the same signature mismatch; a size mismatch is found by the receiver only."""
        by_rank = {rank: bytes(received[:_SIGNATURE_BYTES]) for rank, received in self._received.items()}
        by_rank[self._channel.rank] = self._own
        signatures = [by_rank[rank] for rank in range(self._channel.size)]
        usual = max(signatures, key=Counter(signatures).__getitem__)  # the first of the most frequent
        for rank, signature in enumerate(signatures):
            if signature != usual:
                own, others = decode_signature(signature), decode_signature(usual)
                return Mismatch(rank, f"it starts {own}, the other members start {others}")
        for peer, received in self._received.items():
            (size,) = _SIZE.unpack(received[_SIGNATURE_BYTES:])
            if size != self._expected[peer]:
                return Mismatch(peer, f"all_to_all: it sends {size} bytes where {self._expected[peer]} are expected")
        return None


def _tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
