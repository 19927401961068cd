"""ResNets: load one with its weights, cut it into stages, build a stage. Knows torch and torchvision alone."""

from models.architectures import MODEL_NAMES, block_names
from models.costs import counted_costs, measure_costs
from models.cutting import boundary_bytes, cut, same_cut
from models.errors import ArchitectureError, LabelsError, ModelError, PreprocessingError, StageError, WeightsError
from models.loading import LoadedModel, load_model
from models.optimize import (
    AS_IT_IS,
    TOLERANCE,
    CompiledStages,
    CompileError,
    CompileRequest,
    FixedSizes,
    Optimized,
    Recipe,
    Tuning,
    compiled_recipe,
    computing_on,
    deviation,
    optimize,
)
from models.preprocessing import Normalize, Preprocessing
from models.stage_spec import StageSpec
from models.stages import (
    Reference,
    Stage,
    build_stage,
    reference,
    reference_stage,
    stage_input_dtype,
    stage_input_shape,
    stage_output_shape,
    stage_weights,
)

__all__ = [
    "AS_IT_IS",
    "MODEL_NAMES",
    "TOLERANCE",
    "ArchitectureError",
    "CompileError",
    "CompileRequest",
    "CompiledStages",
    "FixedSizes",
    "LabelsError",
    "LoadedModel",
    "ModelError",
    "Normalize",
    "Optimized",
    "Preprocessing",
    "PreprocessingError",
    "Recipe",
    "Reference",
    "Stage",
    "StageError",
    "StageSpec",
    "Tuning",
    "WeightsError",
    "block_names",
    "boundary_bytes",
    "build_stage",
    "compiled_recipe",
    "computing_on",
    "counted_costs",
    "cut",
    "deviation",
    "load_model",
    "measure_costs",
    "optimize",
    "reference",
    "reference_stage",
    "same_cut",
    "stage_input_dtype",
    "stage_input_shape",
    "stage_output_shape",
    "stage_weights",
]
