"""Splits a loaded model into stages."""

import math
from collections.abc import Sequence
from dataclasses import replace

from multiworld_serving.models.architectures import architecture
from multiworld_serving.models.costs import count_multiply_adds
from multiworld_serving.models.errors import StageError
from multiworld_serving.models.partition import partition
from multiworld_serving.models.preprocessing import check_image_size
from multiworld_serving.models.stage_spec import StageSpec
from multiworld_serving.models.weights.loading import LoadedModel


def split_model(
    model: LoadedModel,
    num_stages: int,
    *,
    costs: Sequence[float] | None = None,
    transfers: Sequence[float] | None = None,
    image_size: int | None = None,
) -> list[StageSpec]:
    """Split a model at block boundaries so that the slowest stage is as fast as possible (see `partition`).

    Args:
        num_stages: from 1 to the number of blocks.
        costs: cost of each block in the order of `block_names`, in any unit; multiply-adds by default.
        transfers: cost of each boundary for the stage on either side, in the unit of `costs`; 0 by default.
        image_size: side of the image in pixels; the model's crop size by default.
    Returns:
        The stages in order. Together they are the whole model.
    Raises:
        StageError: `num_stages` is out of range, or `costs` is not one finite number >= 0 per block.
        PreprocessingError: `image_size` is out of range.
    """
    size = check_image_size(model.preprocessing.crop_size if image_size is None else image_size)
    arch = architecture(model.name)
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or not 1 <= num_stages <= len(arch.blocks):
        raise StageError(
            f"cannot split {model.name} into {num_stages} stages: it has {len(arch.blocks)} blocks; "
            f"expected 1 to {len(arch.blocks)} stages"
        )
    if costs is None:
        costs = count_multiply_adds(model.name, size, num_classes=model.num_classes)
    elif len(costs) != len(arch.blocks) or not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise StageError(f"invalid costs {list(costs)} for {model.name}; expected {len(arch.blocks)} numbers >= 0")
    boundaries = [float(size_bytes) for size_bytes in boundary_bytes(model, image_size=size)]
    ranges = partition(costs, num_stages, boundaries, transfers=transfers)
    return [
        StageSpec(
            model=model.name,
            version=model.version,
            num_classes=model.num_classes,
            index=index,
            num_stages=num_stages,
            first_block=first,
            end_block=end,
            mean=model.preprocessing.mean,
            std=model.preprocessing.std,
        )
        for index, (first, end) in enumerate(ranges)
    ]


def boundary_bytes(model: LoadedModel, *, image_size: int | None = None) -> tuple[int, ...]:
    """Bytes per image of the float32 tensor after each block except the last: what is transferred if a stage ends there."""
    size = check_image_size(model.preprocessing.crop_size if image_size is None else image_size)
    arch = architecture(model.name)
    shapes = (arch.output_shape(block, size, model.num_classes) for block in range(len(arch.blocks) - 1))
    return tuple(4 * math.prod(shape) for shape in shapes)


def respecify(spec: StageSpec, model: LoadedModel) -> StageSpec:
    """The spec of the same blocks for another version of the same architecture."""
    return replace(
        spec,
        version=model.version,
        num_classes=model.num_classes,
        mean=model.preprocessing.mean,
        std=model.preprocessing.std,
    )
