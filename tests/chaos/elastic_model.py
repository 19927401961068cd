"""What the tensors of a torture test of elastic worlds hold, and what an all-reduce must make of them.

They hold small whole numbers, of which all reductions are exact in every dtype and in every order: results are compared bit by bit.
"""

import functools
import hashlib
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def operand(key: str, member: int, index: int, dtype: str, count: int, op: str) -> Tensor:
    """[count]: the content of this member's tensor `index` of the call `key`."""
    digest = hashlib.blake2b(f"{key}/{member}/{index}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    wanted: torch.dtype = getattr(torch, dtype)
    if op == "PRODUCT":
        return torch.tensor([-2, -1, 1, 2])[torch.randint(0, 4, (count,), generator=generator)].to(wanted)
    return torch.randint(-8, 9, (count,), generator=generator).to(wanted)


def explains(result: Tensor, operands: Sequence[Tensor], op: str) -> bool:
    """Whether this is the result of reducing these operands."""
    total = functools.reduce(_COMBINE[op], operands)
    if op == "AVG":
        total = total.div(len(operands), rounding_mode=None if total.is_floating_point() else "trunc")
    return torch.equal(result, total)


def sets_of_participants(members: Iterable[int], present: set[int], size: int) -> Iterable[tuple[int, ...]]:
    """All sets of this many members that include all of `present`, in the order of `members`."""
    ordered = list(members)
    for chosen in itertools.combinations([each for each in ordered if each not in present], size - len(present)):
        yield tuple(each for each in ordered if each in present or each in chosen)
