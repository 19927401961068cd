"""Execution modes of a stage, and the candidates for a device."""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import torch

from multiworld_serving.models.errors import StageError
from multiworld_serving.models.optimize.fusing import fusable

Precision = Literal["float32", "bfloat16", "float16", "auto"]
Optimize = Literal["none", "eager", "compile", "auto", "measure"]
StagePrecision = Literal["float32", "bfloat16", "float16"]
Method = Literal["none", "eager", "fused", "graphed", "compiled"]

PRECISION: tuple[str, ...] = get_args(Precision)
EDGE_DTYPE = ("float32", "bfloat16", "float16")
OPTIMIZE: tuple[str, ...] = get_args(Optimize)
_IN_16_BITS = ("bfloat16", "float16")
_FAST_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""CPU flags of bfloat16 matrix multiplication: x86 with AMX, x86 with AVX-512, and ARM."""


@dataclass(frozen=True)
class Tuning:
    """Optimization that the leader requests from workers. With "auto" and "measure", each worker chooses for its device.

    Attributes:
        limit_s: longest time for measuring, in addition to the warm-up.
        edge_dtype: as which float32 tensors travel between stages.

    Raises:
        StageError: a value is unknown, or two values contradict each other.
    """

    precision: str = "float32"
    optimize: str = "none"
    limit_s: float = 2.0
    edge_dtype: str = "float32"

    def __post_init__(self) -> None:
        for field, value, known in (
            ("precision", self.precision, PRECISION),
            ("optimize", self.optimize, OPTIMIZE),
            ("edge_dtype", self.edge_dtype, EDGE_DTYPE),
        ):
            if value not in known:
                raise StageError(f"{field} is {value!r}; expected one of {', '.join(known)}")
        if self.optimize == "none" and self.precision in ("bfloat16", "float16"):
            raise StageError(f"optimize none computes in float32, not in {self.precision}; choose optimize eager")
        if not (math.isfinite(self.limit_s) and self.limit_s >= 0):
            raise StageError(f"limit_s is {self.limit_s}; expected seconds, 0 or more")


NO_TUNING = Tuning()
"""The model without optimizations; bit-identical to the unsplit model."""


@dataclass(frozen=True)
class ExecutionMode:
    """How a stage is computed.

    Attributes:
        method: "none" is the unchanged stage; "eager" folds batch normalisation and uses channels-last tensors; "fused" also fuses
            convolutions with the operations that follow, and replaces "eager" where the device supports it; "graphed" is "eager"
            recorded as CUDA graphs (see `cuda_graphs`); "compiled" is "eager" compiled by inductor (see `compiling`).
        precision: of the blocks. Normalisation and softmax are always computed in float32.
    """

    method: Method
    precision: StagePrecision = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """dtype of weights and activations inside the stage."""
        return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(self.precision, torch.float32)

    def __str__(self) -> str:
        return f"{self.method}/{self.precision}"


UNOPTIMIZED = ExecutionMode("none")


def candidates(tuning: Tuning, device: torch.device) -> tuple[ExecutionMode, ...]:
    """Modes to try, the fallback first. A single one needs no measuring."""
    if tuning.optimize == "none":
        return (UNOPTIMIZED,)
    modes = []
    if tuning.optimize == "measure" and tuning.precision in ("float32", "auto"):
        modes.append(UNOPTIMIZED)
    modes += [_eager_or_fused(precision, device) for precision in _precisions(tuning, device)]
    if device.type == "cuda" and tuning.optimize in ("compile", "measure"):
        modes += [ExecutionMode("graphed", precision) for precision in _precisions(tuning, device)]
    return tuple(modes)


def compiled_mode(tuning: Tuning, device: torch.device) -> ExecutionMode:
    """The mode to compile: in the lowest precision that may be chosen."""
    return ExecutionMode("compiled", _precisions(tuning, device)[-1])


def may_be_compiled(tuning: Tuning, device: torch.device) -> bool:
    """Whether compiled code from the cache may be used. "auto" is for 16 bits only: in float32 it was not faster (decision 36)."""
    if device.type != "cpu" or tuning.optimize not in ("auto", "compile", "measure"):
        return False
    return tuning.optimize != "auto" or compiled_mode(tuning, device).precision in _IN_16_BITS


def compiles(tuning: Tuning, mode: ExecutionMode) -> bool:
    """Whether to compile a stage that is computed in this mode."""
    if tuning.optimize == "compile":
        return mode.method != "compiled"
    return tuning.optimize == "auto" and mode.method in ("eager", "fused") and mode.precision in _IN_16_BITS


def _eager_or_fused(precision: StagePrecision, device: torch.device) -> ExecutionMode:
    mode = ExecutionMode("eager", precision)
    return ExecutionMode("fused", precision) if fusable(device, mode.dtype) else mode


def _precisions(tuning: Tuning, device: torch.device) -> tuple[StagePrecision, ...]:
    match tuning.precision:
        case "bfloat16":
            return ("bfloat16",)
        case "float16":
            return ("float16",)
        case "auto" if has_native_bfloat16(device):
            return ("float32", "bfloat16")
        case _:
            return ("float32",)


@lru_cache(maxsize=8)
def has_native_bfloat16(device: torch.device) -> bool:
    """Whether the device supports bfloat16 in hardware. Elsewhere it is emulated and slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    flags = next(iter(cpuinfo_lines("flags", "features")), "")
    return not _FAST_BFLOAT16.isdisjoint(flags.split())


@lru_cache(maxsize=4)
def cpuinfo_lines(*names: str) -> tuple[str, ...]:
    """Lines of /proc/cpuinfo that begin with one of `names`, of all processors; empty if the file does not exist."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    return tuple(line for line in lines if line.lower().startswith(names))
