"""A stage made fast for one device: how it may be computed, how far its output may be off, and which way is the fastest here."""

from models.optimize.closeness import TOLERANCE, deviation
from models.optimize.compiling import UNAVAILABLE, CompiledStages, CompileError, CompileRequest
from models.optimize.fusing import computing_on
from models.optimize.optimizing import Optimized, optimize
from models.optimize.recipes import AS_IT_IS, OPTIMIZE, PRECISION, Optimize, Precision, Recipe, Tuning, compiled_recipe
from models.optimize.sizes import FixedSizes

__all__ = [
    "AS_IT_IS",
    "OPTIMIZE",
    "PRECISION",
    "TOLERANCE",
    "UNAVAILABLE",
    "CompileError",
    "CompileRequest",
    "CompiledStages",
    "FixedSizes",
    "Optimize",
    "Optimized",
    "Precision",
    "Recipe",
    "Tuning",
    "compiled_recipe",
    "computing_on",
    "deviation",
    "optimize",
]
