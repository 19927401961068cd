"""Optimizes a stage for one device: rewrites its graph, compiles it, and compares the result with the stage as written.

Start reading at `tuning` and `optimizing`.
"""

from multiworld_serving.models.optimize.compiled import CompiledStage, CompileError, batch_sizes
from multiworld_serving.models.optimize.deviation import TOLERANCE, deviation
from multiworld_serving.models.optimize.fusing import torch_threads
from multiworld_serving.models.optimize.optimizing import OptimizedStage, optimize
from multiworld_serving.models.optimize.tuning import NO_TUNING, ExecutionMode, Tuning

__all__ = [
    "NO_TUNING",
    "TOLERANCE",
    "CompileError",
    "CompiledStage",
    "ExecutionMode",
    "OptimizedStage",
    "Tuning",
    "batch_sizes",
    "deviation",
    "optimize",
    "torch_threads",
]
