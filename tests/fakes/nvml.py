"""The GPUs of a machine, as NVML and CUDA show them to this process. In place of nvidia-ml-py and of torch's functions."""

import os
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from multiworld_serving.workers import devices


@dataclass(frozen=True)
class Gpu:
    """Attributes:
    bus: of its PCI address.
    slices: the UUIDs of its MIG slices by number, "" if there is none; None if it is not divided.
    """

    bus: int
    slices: tuple[str, ...] | None = None
    can_be_divided: bool = True

    @property
    def uuid(self) -> str:
        return f"GPU-{self.bus:04x}"


class FakeNvml(ModuleType):
    """The module pynvml for these GPUs, in the order of their addresses. CUDA numbers them in the order of `CUDA_VISIBLE_DEVICES`."""

    class NVMLError(Exception):
        """An error of the driver."""

    class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818 - as in pynvml
        """This GPU cannot do it."""

    class NVMLError_NotFound(NVMLError):  # noqa: N801, N818
        """There is no such slice."""

    def __init__(self, *gpus: Gpu) -> None:
        super().__init__("pynvml")
        self.gpus = gpus
        self.initialized = 0

    def nvmlInit(self) -> None:
        self.initialized += 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.initialized
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> Gpu:
        return next(gpu for gpu in self.gpus if address == f"00000000:{gpu.bus:02x}:00.0")

    def nvmlDeviceGetUUID(self, handle: Gpu | str) -> str:
        return handle.uuid if isinstance(handle, Gpu) else handle

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        if not gpu.can_be_divided:
            raise self.NVMLError_NotSupported
        return [int(gpu.slices is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, number: int) -> str:
        if gpu.slices is None or number >= len(gpu.slices) or not gpu.slices[number]:
            raise self.NVMLError_NotFound
        return gpu.slices[number]

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> Any:
        if gpu.slices is not None:
            raise self.NVMLError_NotSupported("Not Supported")
        return SimpleNamespace(gpu=gpu.bus)

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int:
        assert sensor == 0
        return 40 + gpu.bus

    def nvmlDeviceGetPowerUsage(self, gpu: Gpu) -> int:
        return 1000 * gpu.bus

    # -- what CUDA shows ------------------------------------------------------------------------------------------------------

    def visible(self) -> list[Gpu]:
        """A process sees one slice, or GPUs that are not divided."""
        text = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [*map(str, range(len(self.gpus)))] if text is None else text.split(",")
        if names and names[0].startswith("MIG-"):
            return [gpu for gpu in self.gpus if names[0] in (gpu.slices or ())]
        named = [
            gpu
            for name in names
            for at, gpu in enumerate(self.gpus)
            if name and (name == str(at) or gpu.uuid.startswith(name))
        ]
        return [gpu for gpu in named if gpu.slices is None]


def install(patch: pytest.MonkeyPatch, *gpus: Gpu, visible: str | None = None) -> FakeNvml:
    """Let this process have these GPUs, with this value of CUDA_VISIBLE_DEVICES."""
    fake = FakeNvml(*gpus)
    patch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        patch.delenv("CUDA_VISIBLE_DEVICES")
    patch.setitem(sys.modules, "pynvml", fake)
    patch.setattr(torch.cuda, "device_count", lambda: len(fake.visible()))
    patch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(pci_domain_id=0, pci_bus_id=fake.visible()[device.index].bus, pci_device_id=0),
    )
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 4 << 30))
    devices.pci_address.cache_clear()
    return fake
