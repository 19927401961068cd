"""Stages of built-in ResNets and of bundles behind one interface: read a description, load the stage."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from multiworld_serving.models.bundle.stage import KIND, BundleStage, BundleStageSpec, load_bundle_stage
from multiworld_serving.models.errors import StageError
from multiworld_serving.models.stage_spec import StageSpec
from multiworld_serving.models.stages import Stage, build_stage
from multiworld_serving.models.weights.received import received_tensors

AnyStageSpec: TypeAlias = StageSpec | BundleStageSpec
AnyStage: TypeAlias = Stage | BundleStage
"""A module with `spec`: rows in, rows out."""


def stage_spec_from_json(text: str) -> AnyStageSpec:
    """The description of a stage.

    Raises:
        StageError: it is not one.
    """
    try:
        fields: Any = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise StageError(f"stage description is not JSON ({error})") from error
    if isinstance(fields, dict) and fields.get("kind") == KIND:
        return BundleStageSpec.from_fields({name: value for name, value in fields.items() if name != "kind"})
    return StageSpec.from_json(text)


def load_stage(spec: AnyStageSpec, weights: bytearray) -> AnyStage:
    """The stage on the CPU with its weights, ready to run: rows in, rows out.

    Args:
        weights: a safetensors file. The stage may share memory with it.
    Raises:
        ModelError, RuntimeError: the weights do not belong to the stage.
    """
    if isinstance(spec, BundleStageSpec):
        return load_bundle_stage(spec, weights)
    stage = build_stage(spec)
    stage.load_state_dict(received_tensors(weights)[0], strict=True)
    return stage
