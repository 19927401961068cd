"""Optimizes a stage for one device: execution modes, their accuracy, and the choice of the fastest.

Start reading at `selection` and `execution_modes`.
"""

from multiworld_serving.models.optimize.compiling import UNAVAILABLE, CompiledStageCache, CompileError, CompileRequest
from multiworld_serving.models.optimize.execution_modes import (
    NO_TUNING,
    UNOPTIMIZED,
    ExecutionMode,
    Tuning,
    compiled_mode,
    compiles,
    may_be_compiled,
)
from multiworld_serving.models.optimize.fusing import torch_threads
from multiworld_serving.models.optimize.padded_stage import PaddedStage
from multiworld_serving.models.optimize.selection import TOLERANCE, OptimizedStage, deviation, optimize

__all__ = [
    "NO_TUNING",
    "TOLERANCE",
    "UNAVAILABLE",
    "UNOPTIMIZED",
    "CompileError",
    "CompileRequest",
    "CompiledStageCache",
    "ExecutionMode",
    "OptimizedStage",
    "PaddedStage",
    "Tuning",
    "compiled_mode",
    "compiles",
    "deviation",
    "may_be_compiled",
    "optimize",
    "torch_threads",
]
