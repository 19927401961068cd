"""The device that a worker computes on."""

import torch

from config import UserError


def check_device(name: str) -> torch.device:
    """Raises UserError when this machine does not have it."""
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            there = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
            raise UserError(
                f"device {name!r} is not there: this machine has {there}; use --device cpu or another index"
            )
    return device


def spread(name: str, workers: int) -> list[str]:
    """The device of each of so many workers of one machine: "cuda" without a number deals out its GPUs in turn.

    Raises UserError when the machine does not have it.
    """
    if check_device(name).type == "cuda" and ":" not in name:
        return [f"cuda:{worker % torch.cuda.device_count()}" for worker in range(workers)]
    return [name] * workers
