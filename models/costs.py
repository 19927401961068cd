"""Compute cost of each block: counted from the architecture, or measured on a device."""

import copy
import statistics
import time
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from multiworld_serving.models.architectures import block_modules, block_names, meta_model
from multiworld_serving.models.errors import ModelError
from multiworld_serving.models.preprocessing import Normalize, check_image_size
from multiworld_serving.models.weights.loading import LoadedModel


@lru_cache(maxsize=64)
def count_multiply_adds(name: str, image_size: int, *, num_classes: int = 1000) -> tuple[int, ...]:
    """Multiply-adds of each block for one square image of `image_size` pixels, in the order of `block_names(name)`.

    Counts convolutions and the last layer, as is usual in papers; the other operations are cheap and roughly proportional.

    Raises:
        ModelError: unknown model, image size out of range.
    """
    check_image_size(image_size)
    model = copy.deepcopy(meta_model(name, num_classes))
    count = 0

    def add(module: nn.Module, _args: object, output: Tensor) -> None:
        nonlocal count
        weight = module.get_parameter("weight")
        count += output.numel() * weight[0].numel()

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(add)
    batch = torch.empty(1, 3, image_size, image_size, device="meta")
    costs = []
    for block in block_names(name):
        count = 0
        for _, module in block_modules(model, block):
            batch = module(batch)
        costs.append(count)
    return tuple(costs)


def measure_costs(
    model: LoadedModel,
    *,
    image_size: int | None = None,
    batch_size: int = 1,
    device: str = "cpu",
    repeats: int = 5,
    warmup: int = 2,
) -> tuple[float, ...]:
    """Seconds per block for a batch on `device`: the median of `repeats` passes, in the order of `block_names`.

    Blocks for about `warmup + repeats` inferences. The model is not moved; devices other than the CPU use a copy of its weights.

    Raises:
        ModelError: a size or count is too small.
        RuntimeError: torch cannot use the device.
    """
    size = check_image_size(model.preprocessing.crop_size if image_size is None else image_size)
    for field, value, least in (("batch_size", batch_size, 1), ("repeats", repeats, 1), ("warmup", warmup, 0)):
        if value < least:
            raise ModelError(f"{field} is {value}; expected at least {least}")
    target = torch.device(device)
    module = model.module if target.type == "cpu" else copy.deepcopy(model.module).to(target)
    blocks = [nn.Sequential(*(m for _, m in block_modules(module, block))) for block in block_names(model.name)]
    blocks[0].insert(0, Normalize(model.preprocessing.mean, model.preprocessing.std).to(target))
    noise = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (batch_size, 3, size, size), dtype=torch.uint8, generator=noise).to(target)
    passes = [_timed_pass(blocks, images, _synchronizer(target)) for _ in range(warmup + repeats)]
    return tuple(statistics.median(times) for times in zip(*passes[warmup:], strict=True))


@torch.inference_mode()
def _timed_pass(blocks: list[nn.Sequential], batch: Tensor, synchronize: Callable[[], None]) -> list[float]:
    times = []
    for block in blocks:
        synchronize()
        start_s = time.perf_counter()
        batch = block(batch)
        synchronize()
        times.append(time.perf_counter() - start_s)
    return times


def _synchronizer(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
