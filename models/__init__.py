"""Models: load one with its weights, split it into stages, build and optimize a stage.

Imports only torch, torchvision and safetensors. For built-in ResNets start reading at `weights.loading`, then `split` and `stages`; for all
other models at `bundle.graph` and `bundle.stage`. `stage_kinds` is what both have in common.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiworld_serving.models.architectures import MODEL_NAMES, block_names
    from multiworld_serving.models.bundle.cutting import cut_graph
    from multiworld_serving.models.bundle.files import Bundle, read_bundle
    from multiworld_serving.models.bundle.graph import Graph
    from multiworld_serving.models.bundle.stage import BundleStage, BundleStageSpec, stage_specs, weights_head
    from multiworld_serving.models.costs import count_multiply_adds, measure_costs
    from multiworld_serving.models.errors import (
        ArchitectureError,
        BundleError,
        LabelsError,
        ModelError,
        PreprocessingError,
        StageError,
        WeightsError,
    )
    from multiworld_serving.models.optimize import (
        NO_TUNING,
        TOLERANCE,
        UNOPTIMIZED,
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
    from multiworld_serving.models.stage_kinds import AnyStage, AnyStageSpec, load_stage, stage_spec_from_json
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
    "UNOPTIMIZED",
    "AnyStage",
    "AnyStageSpec",
    "ArchitectureError",
    "Bundle",
    "BundleError",
    "BundleStage",
    "BundleStageSpec",
    "CompileError",
    "CompileRequest",
    "CompiledStageCache",
    "ExecutionMode",
    "Graph",
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
    "cut_graph",
    "deviation",
    "load_model",
    "load_stage",
    "measure_costs",
    "optimize",
    "read_bundle",
    "reference_stage",
    "respecify",
    "split_model",
    "stage_input_dtype",
    "stage_input_shape",
    "stage_output_shape",
    "stage_spec_from_json",
    "stage_specs",
    "stage_weights",
    "torch_threads",
    "weights_head",
]

_MODULES = (
    "architectures",
    "bundle.cutting",
    "bundle.files",
    "bundle.graph",
    "bundle.stage",
    "costs",
    "errors",
    "optimize",
    "preprocessing",
    "split",
    "stage_kinds",
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
