"""ResNets as leaders cut and send them, and as workers load them."""

from functools import cache

import torch

from multiworld_serving.models.bundle.files import Bundle, read_bundle
from multiworld_serving.models.bundle.stage import BundleStage, BundleStageSpec, load_bundle_stage
from multiworld_serving.models.export.bundle_cache import exported
from multiworld_serving.models.optimize.tuning import NO_TUNING, Tuning
from multiworld_serving.models.stages.stage import stage_spec
from multiworld_serving.server.leader.versions.stage_plan import BundlePlan, make_bundle_plan


@cache
def _resnet(weights: str, image_size: int) -> Bundle:
    """A ResNet-18 from the cache, where services find it, too."""
    return read_bundle(exported("resnet18", weights, image_size=image_size))


def resnet_plan(
    weights: str, num_stages: int, tuning: Tuning = NO_TUNING, number: int = 1, *, image_size: int
) -> tuple[BundlePlan, ...]:
    """The stages of a ResNet-18."""
    return make_bundle_plan(_resnet(weights, image_size), num_stages, tuning, number)


def sent_weights(plan: BundlePlan) -> torch.Tensor:
    """The bytes that the leader sends."""
    return torch.cat(list(plan.weights.chunks()))


def bundle_spec(text: str) -> BundleStageSpec:
    """The description of a stage of a bundle, as a worker reads it."""
    found = stage_spec(text)
    assert isinstance(found, BundleStageSpec)
    return found


def sent_stage(plan: BundlePlan) -> BundleStage:
    """The stage as a worker loads it, before it is optimized."""
    return load_bundle_stage(bundle_spec(plan.spec.to_json()), sent_weights(plan))
