"""ResNets as leaders cut and send them, and as workers load them."""

import dataclasses
import os
import tempfile
from functools import cache
from pathlib import Path

import torch

from multiworld_serving.models.bundle.files import Bundle, read_bundle
from multiworld_serving.models.bundle.stage import BundleStage, BundleStageSpec, load_bundle_stage
from multiworld_serving.models.export.bundle_cache import exported
from multiworld_serving.models.export.torchvision_models import LoadedModel, export_loaded
from multiworld_serving.models.optimize.tuning import NO_TUNING, Tuning
from multiworld_serving.models.weights.tensor_file import TensorFile
from multiworld_serving.server.versions.stage_plan import StagePlan, StageWeights
from tests.cut_bundles import bundle_plan

MAX_BATCH_SIZE = 8
_bundles: dict[int, tuple[LoadedModel, Bundle]] = {}
"""By the id of the model."""


def bundle_of(model: LoadedModel) -> Bundle:
    """The bundle of a model, exported once per process."""
    if id(model) not in _bundles:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bundle"
            export_loaded(model, path, max_batch_size=MAX_BATCH_SIZE, num_stages=1)
            _bundles[id(model)] = model, read_bundle(path)
    return _bundles[id(model)][1]


def plan_of(model: LoadedModel, num_stages: int, tuning: Tuning = NO_TUNING, number: int = 1) -> tuple[StagePlan, ...]:
    """The stages of a model."""
    return bundle_plan(bundle_of(model), num_stages, tuning, number)


@cache
def _resnet(weights: str, image_size: int) -> Bundle:
    """A ResNet-18 from the cache, where services find it, too."""
    return read_bundle(exported("resnet18", weights, image_size=image_size))


def resnet_plan(
    weights: str, num_stages: int, tuning: Tuning = NO_TUNING, number: int = 1, *, image_size: int
) -> tuple[StagePlan, ...]:
    """The stages of a ResNet-18."""
    return bundle_plan(_resnet(weights, image_size), num_stages, tuning, number)


def sent_weights(plan: StagePlan) -> torch.Tensor:
    """The bytes that the leader sends."""
    return torch.cat(list(plan.weights.chunks()))


def with_other_weights(plan: StagePlan) -> StagePlan:
    """The last stage with another bias of the last layer."""
    sent = sent_weights(plan)
    (bias,) = (each for each in load_bundle_stage(plan.spec, sent).buffers() if each.shape == (1000,))
    bias += torch.linspace(-5, 5, len(bias))  # shares the memory of `sent`
    empty = TensorFile(os.memfd_create("weights"))
    return dataclasses.replace(plan, weights=StageWeights(sent.numpy().tobytes(), empty, []))


def sent_stage(plan: StagePlan) -> BundleStage:
    """The stage as a worker loads it, before it is optimized."""
    return load_bundle_stage(BundleStageSpec.from_json(plan.spec.to_json()), sent_weights(plan))
