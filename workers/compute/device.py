"""Checks compute devices."""

import torch

from multiworld_serving.common.config import UserError


def check_device(name: str) -> torch.device:
    """The torch device of this name. Raises UserError if this machine does not have it."""
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            there = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
            raise UserError(
                f"device {name!r} does not exist: this machine has {there}; use --device cpu or another index"
            )
    return device
