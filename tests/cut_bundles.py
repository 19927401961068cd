"""Bundles cut into stages, as a leader does it."""

from multiworld_serving.models.bundle.files import Bundle
from multiworld_serving.models.optimize.tuning import NO_TUNING, Tuning
from multiworld_serving.server.predictor import ModelVersion
from multiworld_serving.server.versions.stage_plan import StagePlan, make_bundle_plan
from multiworld_serving.server.versions.version_table import VersionPlan


def bundle_plan(bundle: Bundle, num_stages: int, tuning: Tuning = NO_TUNING, number: int = 1) -> tuple[StagePlan, ...]:
    """The stages of a bundle."""
    return make_bundle_plan(bundle, num_stages, tuning, number)


def version_of(stages: tuple[StagePlan, ...]) -> VersionPlan:
    """The version with these stages."""
    return VersionPlan(ModelVersion(stages[0].number, stages[0].spec.version), stages)


def plan_without_stages(number: int = 1) -> VersionPlan:
    """A version for tests that compute nothing."""
    return VersionPlan(ModelVersion(number, f"v{number}"), ())
