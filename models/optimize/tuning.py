"""What a leader asks of workers, and the execution mode that a device makes of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from multiworld_serving.models.errors import StageSpecError

Precision = Literal["float32", "tf32", "bfloat16", "float16", "auto"]
Optimize = Literal["eager", "fused", "compile"]
Method = Literal["eager", "fused", "compiled"]

COMPUTE_DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""dtype of weights and activations, by precision. TF32 rounds only the operands of convolutions and matrix products, inside the GPU."""
_EDGE_DTYPES = ("float32", "bfloat16", "float16")
_FAST_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""CPU flags of bfloat16 matrix multiplication: x86 with AMX, x86 with AVX-512, and ARM."""


@dataclass(frozen=True)
class Tuning:
    """Optimization that the leader requests from workers.

    Attributes:
        precision: "auto" is bfloat16 on devices that have it in hardware, and float32 on others. "tf32" is float32 on devices without TF32.
        edge_dtype: as which float32 tensors travel between stages.

    Raises:
        StageSpecError: a value is unknown, or two values contradict each other.
    """

    precision: str = "float32"
    optimize: str = "eager"
    edge_dtype: str = "float32"

    def __post_init__(self) -> None:
        for field, value, known in (
            ("precision", self.precision, get_args(Precision)),
            ("optimize", self.optimize, get_args(Optimize)),
            ("edge_dtype", self.edge_dtype, _EDGE_DTYPES),
        ):
            if value not in known:
                raise StageSpecError(f"{field} is {value!r}; expected one of {', '.join(known)}")
        if self.optimize == "eager" and self.precision in ("tf32", "bfloat16", "float16"):
            raise StageSpecError(f"optimize eager computes in float32, not in {self.precision}; choose optimize fused")

    def stage_precision(self, device: torch.device) -> str:
        """The precision of the blocks of a stage on this device."""
        if self.precision == "tf32" and not has_tf32(device):
            return "float32"
        if self.precision != "auto":
            return self.precision
        return "bfloat16" if self.optimize != "eager" and has_native_bfloat16(device) else "float32"


NO_TUNING = Tuning()
"""The model without optimizations; bit-identical to the unsplit model."""


@dataclass(frozen=True)
class ExecutionMode:
    """How a stage is computed.

    Attributes:
        method: "eager" is the unchanged stage; "fused" folds batch normalisation, uses channels-last tensors, and fuses convolutions with
            what follows where the device supports it; "compiled" is compiled by inductor (see `compiled`).
        precision: of the blocks. Normalisation and softmax are always computed in float32.
    """

    method: Method
    precision: str = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """dtype of weights and activations inside the stage."""
        return COMPUTE_DTYPES[self.precision]

    @contextmanager
    def active(self, device: torch.device) -> Iterator[None]:
        """Compute float32 on a GPU with or without TF32 while the block runs, in the whole process. cuDNN uses TF32 by default.

        The flags with the old names set those with the new names. If only the new ones are set, torch 2.14 raises errors where it reads
        the old ones. Stages in Python may have set any of them. Not run on a GPU yet: tests emulate TF32.
        """
        if device.type != "cuda":
            yield
            return
        matmul: Any = torch.backends.cuda.matmul
        cudnn: Any = torch.backends.cudnn
        old_flags, new_flags = (matmul, cudnn), (matmul, cudnn.conv, cudnn.rnn)
        old, new = [_allows_tf32(each) for each in old_flags], [each.fp32_precision for each in new_flags]
        try:
            for library in old_flags:
                library.allow_tf32 = self.precision == "tf32"
            yield
        finally:
            for library, allowed in zip(old_flags, old, strict=True):
                if allowed is not None:
                    library.allow_tf32 = allowed
            for flag, value in zip(new_flags, new, strict=True):
                if flag.fp32_precision != value:
                    flag.fp32_precision = value

    def __str__(self) -> str:
        return f"{self.method}/{self.precision}"


def _allows_tf32(library: Any) -> bool | None:
    """None if flags with new names contradict those with old ones."""
    try:
        return bool(library.allow_tf32)
    except RuntimeError:
        return None


@lru_cache(maxsize=8)
def has_tf32(device: torch.device) -> bool:
    """Whether the device has TF32: GPUs of NVIDIA since Ampere."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache(maxsize=8)
def has_native_bfloat16(device: torch.device) -> bool:
    """Whether the device supports bfloat16 in hardware. Elsewhere it is emulated and slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        lines = Path("/proc/cpuinfo").read_text().lower().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "features"))), "")
    return not _FAST_BFLOAT16.isdisjoint(flags.split())
