"""Parts of stage plans for tests."""

from multiworld_serving.models import StageSpec
from multiworld_serving.server.versions.stage_plan import StagePlan


def resnet_spec(plan: StagePlan) -> StageSpec:
    """The description of a stage of a ResNet."""
    assert isinstance(plan.spec, StageSpec)
    return plan.spec


def sent_weights(plan: StagePlan) -> bytes:
    """The file that the leader sends."""
    return b"".join(chunk.numpy().tobytes() for chunk in plan.weights.chunks())
