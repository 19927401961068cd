"""Ways to compute a stage, and which of them a device may try."""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import torch

from models.errors import StageError
from models.optimize.fusing import fusable

Precision = Literal["float32", "bfloat16", "float16", "auto"]
Optimize = Literal["none", "eager", "compile", "auto"]
StagePrecision = Literal["float32", "bfloat16", "float16"]
Form = Literal["none", "eager", "fused", "graphed", "compiled"]

PRECISION: tuple[str, ...] = get_args(Precision)
OPTIMIZE: tuple[str, ...] = get_args(Optimize)
_FAST_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""Flags of processors that multiply bfloat16 in hardware: x86 with AMX, x86 with AVX-512, and ARM."""


@dataclass(frozen=True)
class Tuning:
    """What the leader wants of its workers. A worker on another device may choose differently where it says "auto".

    Attributes:
        limit_s: how long measuring may take, beyond the warm-up that each stage needs anyway.

    Raises:
        StageError: a word that is none of these, or two that contradict each other.
    """

    precision: str = "float32"
    optimize: str = "none"
    limit_s: float = 2.0

    def __post_init__(self) -> None:
        for field, value, known in (
            ("precision", self.precision, PRECISION),
            ("optimize", self.optimize, OPTIMIZE),
        ):
            if value not in known:
                raise StageError(f"{field} is {value!r}; expected one of {', '.join(known)}")
        if self.optimize == "none" and self.precision in ("bfloat16", "float16"):
            raise StageError(f"optimize none computes in float32, not in {self.precision}; choose optimize eager")
        if not (math.isfinite(self.limit_s) and self.limit_s >= 0):
            raise StageError(f"limit_s is {self.limit_s}; expected seconds, 0 or more")


AS_IT_IS = Tuning()
"""Bit for bit the model as it is written."""


@dataclass(frozen=True)
class Recipe:
    """One way.

    Attributes:
        form: "none" is the stage as it is; "eager" has batch normalisation folded into the convolutions, and
            channels-last tensors; "fused" has the convolutions do what follows them too, and takes the place of "eager"
            where the device can do it; "graphed" is "eager" recorded as CUDA graphs (see `graphs`); "compiled" is code
            that inductor made of "eager" (see `compiling`).
        precision: of the blocks. Images are centred, and probabilities computed, in float32 always.
    """

    form: Form
    precision: StagePrecision = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations inside the stage."""
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.precision]

    def __str__(self) -> str:
        return f"{self.form}/{self.precision}"


PLAIN = Recipe("none")


def candidates(tuning: Tuning, device: torch.device) -> tuple[Recipe, ...]:
    """Ways to try, the one to fall back to first. One alone needs no measuring."""
    if tuning.optimize == "none":
        return (PLAIN,)
    recipes = []
    if tuning.optimize == "auto" and tuning.precision in ("float32", "auto"):
        recipes.append(PLAIN)
    recipes += [_made_fast(precision, device) for precision in _precisions(tuning, device)]
    if device.type == "cuda" and tuning.optimize in ("compile", "auto"):
        recipes += [Recipe("graphed", precision) for precision in _precisions(tuning, device)]
    return tuple(recipes)


def compiled_recipe(tuning: Tuning, device: torch.device) -> Recipe:
    """What is compiled for it: in the shortest precision that may be chosen."""
    return Recipe("compiled", _precisions(tuning, device)[-1])


def _made_fast(precision: StagePrecision, device: torch.device) -> Recipe:
    recipe = Recipe("eager", precision)
    return Recipe("fused", precision) if fusable(device, recipe.dtype) else recipe


def _precisions(tuning: Tuning, device: torch.device) -> tuple[StagePrecision, ...]:
    match tuning.precision:
        case "bfloat16":
            return ("bfloat16",)
        case "float16":
            return ("float16",)
        case "auto" if multiplies_bfloat16(device):
            return ("float32", "bfloat16")
        case _:
            return ("float32",)


@lru_cache(maxsize=8)
def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device does bfloat16 in hardware. Elsewhere it is emulated, and slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    flags = next(iter(processor_says("flags", "features")), "")
    return not _FAST_BFLOAT16.isdisjoint(flags.split())


@lru_cache(maxsize=4)
def processor_says(*names: str) -> tuple[str, ...]:
    """Lines of /proc/cpuinfo that begin so, of all processors; none where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    return tuple(line for line in lines if line.lower().startswith(names))
