"""ResNets as leaders cut and send them, and as workers load them."""

import dataclasses

import torch

from multiworld_serving.models import (
    NO_TUNING,
    BundleStage,
    BundleStageSpec,
    LoadedModel,
    Tuning,
    classifier_bundle,
    load_bundle_stage,
    load_model,
)
from multiworld_serving.models.weights.received import received_tensors
from multiworld_serving.server.versions.stage_plan import StagePlan
from multiworld_serving.server.versions.stage_weights import StageWeights
from tests.cut_bundles import bundle_plan

MAX_BATCH_SIZE = 8


def plan_of(model: LoadedModel, num_stages: int, tuning: Tuning = NO_TUNING, number: int = 1) -> tuple[StagePlan, ...]:
    """The stages of a model."""
    return bundle_plan(classifier_bundle(model, MAX_BATCH_SIZE), num_stages, tuning, number)


def resnet_plan(
    weights: str, num_stages: int, tuning: Tuning = NO_TUNING, number: int = 1, *, image_size: int
) -> tuple[StagePlan, ...]:
    """The stages of a ResNet-18."""
    return plan_of(load_model("resnet18", weights, image_size=image_size), num_stages, tuning, number)


def sent_weights(plan: StagePlan) -> bytearray:
    """The file that the leader sends."""
    return bytearray(b"".join(chunk.numpy().tobytes() for chunk in plan.weights.chunks()))


def with_other_weights(plan: StagePlan) -> StagePlan:
    """The last stage with another bias of the last layer."""
    file = sent_weights(plan)
    bias = received_tensors(file)[0]["model.fc.bias"]  # shares memory with the file
    bias += torch.linspace(-5, 5, len(bias))
    return dataclasses.replace(plan, weights=StageWeights(bytes(file), []))


def sent_stage(plan: StagePlan) -> BundleStage:
    """The stage as a worker loads it, before it is optimized."""
    return load_bundle_stage(BundleStageSpec.from_json(plan.spec.to_json()), sent_weights(plan))
