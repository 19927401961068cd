"""Which GPU a worker uses, and where it is. Respects CUDA_VISIBLE_DEVICES and MIG. Not run on a GPU yet: tests use tests/fakes/nvml.py."""

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch

from multiworld_serving.common.config.errors import UserError

logger = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def device_of(name: str, slot: int) -> torch.device:
    """The torch device of this name; "cuda" is the GPU of this slot, in turn. Call it before CUDA is used.

    CUDA shows a process at most one MIG slice. So if GPUs are divided into slices, this counts GPUs and slices by itself, and makes the
    chosen one the only visible one.

    Raises UserError if this machine does not have it.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return device
    units = _gpus_and_slices()
    count = len(units) or torch.cuda.device_count()
    if (device.index or 0) >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
        raise UserError(f"device {name!r} does not exist: this machine has {there}; use --device cpu or another index")
    index = slot % count if device.index is None else device.index
    if not units:
        return torch.device("cuda", index)
    os.environ[_VISIBLE] = units[index]
    return torch.device("cuda", 0)


@functools.cache
def pci_address(device: torch.device) -> str:
    """The PCI address of a GPU, or of the GPU of a MIG slice; empty for a CPU."""
    if device.type != "cuda":
        return ""
    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _gpus_and_slices() -> list[str]:
    """The UUIDs of the visible GPUs and MIG slices; empty if no GPU is divided into slices, or NVML cannot tell."""
    visible = os.environ.get(_VISIBLE)
    names = None if visible is None else [each.strip() for each in visible.split(",")]
    if names is not None and names[0].startswith("MIG-"):
        return names
    try:
        gpus = list(_gpus())
    except Exception as error:  # noqa: BLE001 - nvidia-ml-py is optional, and fails without a driver
        logger.debug("MIG slices are not known: %s", error)
        return []
    if names is not None:
        gpus = [gpu for name in names for gpu in gpus if name and (name == gpu[0] or gpu[1].startswith(name))]
    if all(slices is None for *_, slices in gpus):
        return []
    return [unit for _, uuid, slices in gpus for unit in ([uuid] if slices is None else slices)]


def _gpus() -> Iterator[tuple[str, str, list[str] | None]]:
    """Index and UUID of each GPU, and the UUIDs of its MIG slices; None if it is not divided. Raises ImportError and errors of NVML."""
    import pynvml  # noqa: PLC0415 - optional

    pynvml.nvmlInit()
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        is_divided, slices = False, []
        with contextlib.suppress(pynvml.NVMLError_NotSupported):  # GPUs that cannot be divided
            is_divided = bool(pynvml.nvmlDeviceGetMigMode(gpu)[0])
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) if is_divided else 0):
            with contextlib.suppress(pynvml.NVMLError_NotFound):  # no slice has this number
                slices.append(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)))
        yield str(index), pynvml.nvmlDeviceGetUUID(gpu), slices if is_divided else None
