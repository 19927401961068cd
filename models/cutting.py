"""Cutting a loaded model into stages."""

import math
from collections.abc import Sequence
from dataclasses import replace

from models.architectures import architecture
from models.costs import counted_costs
from models.errors import StageError
from models.loading import LoadedModel
from models.partition import partition
from models.preprocessing import check_image_size
from models.stage_spec import StageSpec


def cut(
    model: LoadedModel,
    num_stages: int,
    *,
    costs: Sequence[float] | None = None,
    transfers: Sequence[float] | None = None,
    image_size: int | None = None,
) -> list[StageSpec]:
    """Cut at block boundaries such that the slowest stage is as fast as possible (see `partition`).

    Args:
        num_stages: from 1 to the number of blocks.
        costs: of each block, in the order of `block_names`, any unit (`measure_costs` gives seconds); counted
            multiply-adds by default.
        transfers: what a stage spends on each boundary that it has, in the unit of `costs`; nothing by default.
        image_size: side in pixels for which costs and boundaries are counted; the model's crop by default.
    Returns:
        The stages in order; together they are the whole model.
    Raises:
        StageError: more stages than blocks or fewer than one, or `costs` is not one finite number from 0 a block.
        PreprocessingError: `image_size` is out of range.
    """
    size = check_image_size(model.preprocessing.crop_size if image_size is None else image_size)
    arch = architecture(model.name)
    if isinstance(num_stages, bool) or not isinstance(num_stages, int) or not 1 <= num_stages <= len(arch.blocks):
        raise StageError(
            f"cannot cut {model.name} into {num_stages} stages: it has {len(arch.blocks)} blocks; "
            f"expected 1 to {len(arch.blocks)} stages"
        )
    if costs is None:
        costs = counted_costs(model.name, size, num_classes=model.num_classes)
    elif len(costs) != len(arch.blocks) or not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise StageError(f"costs {list(costs)} do not fit {model.name}; expected {len(arch.blocks)} numbers from 0 up")
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
    """Bytes of float32 that one image is behind each block but the last: what travels if the model is cut there."""
    size = check_image_size(model.preprocessing.crop_size if image_size is None else image_size)
    arch = architecture(model.name)
    shapes = (arch.output_shape(block, size, model.num_classes) for block in range(len(arch.blocks) - 1))
    return tuple(4 * math.prod(shape) for shape in shapes)


def same_cut(spec: StageSpec, model: LoadedModel) -> StageSpec:
    """The same blocks of another version of the same architecture."""
    return replace(
        spec,
        version=model.version,
        num_classes=model.num_classes,
        mean=model.preprocessing.mean,
        std=model.preprocessing.std,
    )
