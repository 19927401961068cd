"""Checked mode: the members compare fingerprints of each collective before its data moves.

If members start different collectives, the results are wrong or the collectives never complete; Gloo even ends a process that receives
more than it posted. In checked mode, each member sends each other member a fingerprint of fixed length before every collective: the
signature (`all_reduce(float32[12], SUM)`) and, for an all-to-all, the number of bytes for the receiver. A mismatch breaks the world with
cause `error`. This detects program errors. It does not protect against a malicious member, which holds the secret of the world and can
send any data. Independently of checked mode, each message carries its own signature (multiworld/transport/connection.py).
"""

import functools
import struct
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from multiworld.collectives.channel import CollectiveChannel

_LINE_BYTES = 96
_SIZE = struct.Struct("!Q")
"""Follows the signature: bytes that an all-to-all sends to the receiver of the fingerprint; 0 for other collectives."""
_WORDS = "what comes next"


class MismatchError(Exception):
    """The fingerprints of the members differ.

    Attributes:
        rank: the first rank whose signature differs from the most frequent one (among equally frequent ones, that of the lowest rank
            counts); for a size mismatch, the sender.
        detail: both sides of the mismatch as text.
    """

    def __init__(self, rank: int, detail: str) -> None:
        super().__init__(rank, detail)
        self.rank = rank
        self.detail = detail


class CollectiveFingerprint:
    """Exchanges and compares the fingerprints of one collective.

    Args:
        signature: the signature of the plan.
        splits_bytes: for an all-to-all, the bytes sent to each rank and the bytes expected from each rank.
        on_heard: called once, under the world's lock, when all fingerprints are received and ours is sent; given the mismatch or None.
    """

    def __init__(
        self,
        exchange: CollectiveChannel,
        signature: str,
        splits_bytes: tuple[list[int], list[int]] | None,
        on_heard: Callable[[MismatchError | None], object],
    ) -> None:
        self._exchange = exchange
        self._ours = _line(signature)
        self._sent, self._expected = splits_bytes or ([0] * exchange.size, [0] * exchange.size)
        self._said = {peer: bytearray(_LINE_BYTES + _SIZE.size) for peer in exchange.peers}
        self._awaited = 2 * len(exchange.peers)
        self._on_heard = on_heard

    def begin(self) -> None:
        """Post all sends and receives. Raises RuntimeError when a connection is lost, WorldError when the world has ended."""
        for peer, said in self._said.items():
            self._exchange.post_receive(peer, _tensor(said), _WORDS, self._one_less)
        for peer in self._said:
            ours = _tensor(bytearray(self._ours + _SIZE.pack(self._sent[peer])))
            self._exchange.post_send(peer, ours, _WORDS, self._one_less)

    def _one_less(self) -> None:
        self._awaited -= 1
        if not self._awaited:
            self._on_heard(self._dissent())

    def _dissent(self) -> MismatchError | None:
        """The first mismatch, or None. All members find the same signature mismatch; a size mismatch is found by the receiver only."""
        said = {rank: bytes(line[:_LINE_BYTES]) for rank, line in self._said.items()} | {
            self._exchange.rank: self._ours
        }
        lines = [said[rank] for rank in range(self._exchange.size)]
        usual = max(lines, key=Counter(lines).__getitem__)  # the first of the most frequent
        rank = next((rank for rank, each in enumerate(lines) if each != usual), None)
        if rank is not None:
            return MismatchError(rank, f"it is about to {_words(lines[rank])}, the others to {_words(usual)}")
        for peer, line in self._said.items():
            (comes,) = _SIZE.unpack(line[_LINE_BYTES:])
            if comes != self._expected[peer]:
                detail = f"all_to_all: it sends {comes} bytes where {self._expected[peer]} are expected"
                return MismatchError(peer, detail)
        return None


@functools.lru_cache(256)
def _line(signature: str) -> bytes:
    assert len(signature) <= _LINE_BYTES
    return signature.encode().ljust(_LINE_BYTES, b"\0")


def _words(line: bytes | bytearray) -> str:
    return line.rstrip(b"\0").decode(errors="replace")


def _tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
