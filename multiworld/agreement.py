"""Checked mode: the members agree on what they are about to do before any data moves.

Gloo ends the process that receives more than it posted, with all its worlds. So in checked mode, before every collective, the members
tell each other what it is, in a line of fixed length (`all_reduce(float32[12], SUM)`). Who disagrees breaks the world with cause
`error`. It guards against mistakes, not against a malicious member: who holds the world's secret can still send what it likes.
Messages say what they carry anyway (multiworld/line.py).
"""

import functools
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, ProcessGroup

from multiworld.exchange import Exchange
from multiworld.process_group import FOREVER

_LINE_BYTES = 96
_WORDS = "what comes next"


class DisagreementError(Exception):
    """The members do not agree on what to do.

    Attributes:
        rank: who stands against the majority, or against rank 0 where there is none.
    """

    def __init__(self, rank: int, detail: str) -> None:
        super().__init__(rank, detail)
        self.rank = rank
        self.detail = detail


class Agreement:
    """Every member says what it is about to do, and hears what the others are.

    Args:
        on_heard: called once all have been heard and have ours, under the world's lock; given who disagrees, or None.
    """

    def __init__(
        self, exchange: Exchange, signature: str, on_heard: Callable[[DisagreementError | None], object]
    ) -> None:
        self._exchange = exchange
        self._ours = _line(signature)
        self._said = {peer: bytearray(_LINE_BYTES) for peer in exchange.peers}
        self._awaited = 2 * len(exchange.peers)
        self._on_heard = on_heard

    def begin(self) -> None:
        """Raises RuntimeError when a line is lost, WorldError when the world has ended."""
        ours = _tensor(bytearray(self._ours))
        for peer, said in self._said.items():
            self._exchange.post_receive(peer, _tensor(said), _WORDS, self._one_less)
        for peer in self._said:
            self._exchange.post_send(peer, ours, _WORDS, self._one_less)

    def _one_less(self) -> None:
        self._awaited -= 1
        if not self._awaited:
            self._on_heard(self._dissent())

    def _dissent(self) -> DisagreementError | None:
        """The same at all members."""
        said = {rank: bytes(line) for rank, line in self._said.items()} | {self._exchange.rank: self._ours}
        lines = [said[rank] for rank in range(self._exchange.size)]
        usual = max(lines, key=Counter(lines).__getitem__)  # the first of the most frequent
        rank = next((rank for rank, each in enumerate(lines) if each != usual), None)
        if rank is None:
            return None
        return DisagreementError(rank, f"it is about to {_words(lines[rank])}, the others to {_words(usual)}")


def agree_on_splits(group: ProcessGroup, sent_bytes: list[int], expected_bytes: list[int]) -> None:
    """Compare what each member sends us with what we expect of it. Blocks. Raises DisagreementError, here alone."""
    announced = torch.empty(len(sent_bytes), dtype=torch.int64)
    options = AllToAllOptions()
    options.timeout = FOREVER
    group.alltoall_base(announced, torch.tensor(sent_bytes), [], [], options).wait(FOREVER)
    for rank, (comes, expected) in enumerate(zip(announced.tolist(), expected_bytes, strict=True)):
        if comes != expected:
            raise DisagreementError(rank, f"all_to_all: it sends {comes} bytes where {expected} are expected")


@functools.lru_cache(256)
def _line(signature: str) -> bytes:
    assert len(signature) <= _LINE_BYTES
    return signature.encode().ljust(_LINE_BYTES, b"\0")


def _words(line: bytes | bytearray) -> str:
    return line.rstrip(b"\0").decode(errors="replace")


def _tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
