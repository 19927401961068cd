"""The reductions and dtypes of elastic all-reduces."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.collectives.reductions import AnyReduceOp

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

    AVG is the sum divided by the number of members that contributed. For integers it is rounded towards zero.
    """

    name: str

    @staticmethod
    def of(op: AnyReduceOp) -> "Reduction":
        """Return the reduction for a torch operation. Raises ValueError for unsupported ones."""
        for name, known in _OPS.items():
            if op == known:
                return Reduction(name)
        raise ValueError(f"all_reduce: {op} is not supported, only {', '.join(_OPS)}")

    @property
    def op(self) -> AnyReduceOp:
        """The operation for the world's all-reduce. `finish` completes AVG."""
        return ReduceOp.SUM if self.name == "AVG" else _OPS[self.name]

    @torch.inference_mode()
    def combine(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Combine two operands elementwise into `out`, which may be one of them."""
        _COMBINE[self.name](left, right, out=out)

    @torch.inference_mode()
    def finish(self, total: Tensor, members: int) -> None:
        """Turn the combination of all members' operands into the result, in place."""
        if self.name == "AVG" and members > 1:
            total.div_(members, rounding_mode=None if total.is_floating_point() else "trunc")


@torch.inference_mode()
def copy(into: Tensor, tensor: Tensor) -> None:
    """Copy `tensor` into `into`, which may be an inference tensor: another task of this thread may have created it in inference mode."""
    into.copy_(tensor)
