"""Models: export them as bundles, cut bundles into stages, build and optimize a stage.

Imports only torch, torchvision and safetensors. Start reading at `bundle.graph` and `bundle.stage`, and at `export.exporter`
for how bundles are made.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiworld_serving.models.bundle.cutting import cut_graph
    from multiworld_serving.models.bundle.files import Bundle, read_bundle
    from multiworld_serving.models.bundle.graph import Graph
    from multiworld_serving.models.bundle.stage import (
        BundleStage,
        BundleStageSpec,
        load_bundle_stage,
        stage_specs,
        weights_head,
    )
    from multiworld_serving.models.errors import (
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
        CompiledStage,
        CompileError,
        ExecutionMode,
        OptimizedStage,
        Tuning,
        batch_sizes,
        deviation,
        optimize,
        torch_threads,
    )
    from multiworld_serving.models.preprocessing import Normalize, Preprocessing

__all__ = [
    "NO_TUNING",
    "TOLERANCE",
    "Bundle",
    "BundleError",
    "BundleStage",
    "BundleStageSpec",
    "CompileError",
    "CompiledStage",
    "ExecutionMode",
    "Graph",
    "LabelsError",
    "ModelError",
    "Normalize",
    "OptimizedStage",
    "Preprocessing",
    "PreprocessingError",
    "StageError",
    "Tuning",
    "WeightsError",
    "batch_sizes",
    "cut_graph",
    "deviation",
    "load_bundle_stage",
    "optimize",
    "read_bundle",
    "stage_specs",
    "torch_threads",
    "weights_head",
]

_MODULES = (
    "errors",
    "bundle.graph",
    "bundle.stage",
    "bundle.files",
    "bundle.cutting",
    "preprocessing",
    "optimize",
)
"""In the order in which they are imported: workers need torchvision and loaders no more than frontends do."""


def __getattr__(name: str) -> Any:
    """Import these modules when one of their names is asked for: frontends use `bundle.rows`, and need neither torchvision nor loaders."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in _MODULES:
        found = vars(importlib.import_module(f"{__name__}.{module}"))
        globals().update({each: found[each] for each in __all__ if each in found})
        if name in found:
            break
    return globals()[name]
