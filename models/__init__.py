"""ResNets: load a model with its weights, split it into stages, build and optimize a stage.

Imports only torch, torchvision and safetensors. Start reading at `weights.loading`, then `split` and `stages`. Models of users are in
`bundle` and `export`, which this module does not import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiworld_serving.models.architectures import MODEL_NAMES, block_names
    from multiworld_serving.models.costs import count_multiply_adds, measure_costs
    from multiworld_serving.models.errors import (
        ArchitectureError,
        LabelsError,
        ModelError,
        PreprocessingError,
        StageError,
        WeightsError,
    )
    from multiworld_serving.models.optimize import (
        NO_TUNING,
        TOLERANCE,
        CompiledStageCache,
        CompileError,
        CompileRequest,
        ExecutionMode,
        OptimizedStage,
        PaddedStage,
        Tuning,
        compiled_mode,
        deviation,
        optimize,
        torch_threads,
    )
    from multiworld_serving.models.preprocessing import Normalize, Preprocessing
    from multiworld_serving.models.split import boundary_bytes, respecify, split_model
    from multiworld_serving.models.stage_spec import StageSpec
    from multiworld_serving.models.stages import (
        Reference,
        Stage,
        build_stage,
        reference_stage,
        stage_input_dtype,
        stage_input_shape,
        stage_output_shape,
        stage_weights,
    )
    from multiworld_serving.models.weights.loading import LoadedModel, load_model

__all__ = [
    "MODEL_NAMES",
    "NO_TUNING",
    "TOLERANCE",
    "ArchitectureError",
    "CompileError",
    "CompileRequest",
    "CompiledStageCache",
    "ExecutionMode",
    "LabelsError",
    "LoadedModel",
    "ModelError",
    "Normalize",
    "OptimizedStage",
    "PaddedStage",
    "Preprocessing",
    "PreprocessingError",
    "Reference",
    "Stage",
    "StageError",
    "StageSpec",
    "Tuning",
    "WeightsError",
    "block_names",
    "boundary_bytes",
    "build_stage",
    "compiled_mode",
    "count_multiply_adds",
    "deviation",
    "load_model",
    "measure_costs",
    "optimize",
    "reference_stage",
    "respecify",
    "split_model",
    "stage_input_dtype",
    "stage_input_shape",
    "stage_output_shape",
    "stage_weights",
    "torch_threads",
]

_MODULES = (
    "architectures",
    "costs",
    "errors",
    "optimize",
    "preprocessing",
    "split",
    "stage_spec",
    "stages",
    "weights.loading",
)


def __getattr__(name: str) -> Any:
    """Import these modules when one of their names is asked for: frontends use `bundle.rows`, and need neither torchvision nor loaders."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in _MODULES:
        found = vars(importlib.import_module(f"{__name__}.{module}"))
        globals().update({each: found[each] for each in __all__ if each in found})
    return globals()[name]
