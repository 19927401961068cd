"""What an elastic all-reduce computes: which operations and numbers there are, and how two operands are combined."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.reductions import AnyReduceOp

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)

_COMBINE: dict[str, Callable[..., Any]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "PROD": torch.mul,
}
_OPS = {"SUM": ReduceOp.SUM, "AVG": ReduceOp.AVG, "MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX, "PROD": ReduceOp.PRODUCT}


@dataclass(frozen=True, slots=True)
class Reduction:
    """One of SUM, AVG, MIN, MAX, PROD.

    AVG is the sum divided by how many members took part; of integers it is cut off towards zero.
    """

    name: str

    @staticmethod
    def of(op: AnyReduceOp) -> "Reduction":
        """Raises ValueError for other operations."""
        for name, known in _OPS.items():
            if op == known:
                return Reduction(name)
        raise ValueError(f"all_reduce: {op} is not supported, only {', '.join(_OPS)}")

    @property
    def on_gloo(self) -> AnyReduceOp:
        """What Gloo is asked for; `finish` does the rest."""
        return ReduceOp.SUM if self.name == "AVG" else _OPS[self.name]

    @torch.inference_mode()
    def combine(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        _COMBINE[self.name](left, right, out=out)

    @torch.inference_mode()
    def finish(self, total: Tensor, members: int) -> None:
        """Make what was combined of all members the result, in place."""
        if self.name == "AVG" and members > 1:
            total.div_(members, rounding_mode=None if total.is_floating_point() else "trunc")


@torch.inference_mode()
def copy(into: Tensor, tensor: Tensor) -> None:
    """Write it there, also where that was made in the inference mode: another task of this thread may have been in it."""
    into.copy_(tensor)
