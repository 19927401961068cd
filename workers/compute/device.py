"""Checks compute devices, and what memory they have."""

import torch

from multiworld_serving.common.config import UserError, available_memory_bytes


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


def free_memory_mb(device: torch.device) -> int:
    """Free memory of the device, in 10^6 bytes; 0 if it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 10**6
    return (available_memory_bytes() or 0) // 10**6
