"""Checked mode: the members agree on what they are about to do before any data moves.

Gloo ends the process that receives more than it posted, with all its worlds. So in checked mode every collective is preceded by an
all-gather of one line of fixed length that says what it is (`all_reduce(float32[12], SUM)`). Who disagrees breaks the world with cause
`error`. It guards against mistakes, not against a malicious member: who holds the world's secret can still send what it likes.
Messages say what they carry anyway (multiworld/line.py).
"""

import functools
from collections import Counter

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, ProcessGroup

from multiworld.process_group import FOREVER

_LINE_BYTES = 96


class DisagreementError(Exception):
    """The members do not agree on what to do.

    Attributes:
        rank: who stands against the majority, or against rank 0 where there is none.
    """

    def __init__(self, rank: int, detail: str) -> None:
        super().__init__(rank, detail)
        self.rank = rank
        self.detail = detail


def agree(group: ProcessGroup, size: int, signature: str) -> None:
    """Wait until every member has said what it is about to do. Blocks. Raises DisagreementError, the same at all members."""
    line = _line(signature)
    said = bytearray(_LINE_BYTES * size)
    options = AllgatherOptions()
    options.timeout = FOREVER
    group._allgather_base(_tensor(said), _tensor(bytearray(line)), options).wait(FOREVER)
    if said != line * size:
        lines = [bytes(said[at : at + _LINE_BYTES]) for at in range(0, len(said), _LINE_BYTES)]
        usual = max(lines, key=Counter(lines).__getitem__)  # the first of the most frequent
        rank = next(rank for rank, each in enumerate(lines) if each != usual)
        raise DisagreementError(rank, f"it is about to {_words(lines[rank])}, the others to {_words(usual)}")


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
