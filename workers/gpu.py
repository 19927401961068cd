"""What NVML says of the GPU that a worker computes on, read on a thread of its own: a driver that hangs holds up nobody."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch

logger = logging.getLogger(__name__)

EVERY_S = 5.0
STALE_S = 15.0
"""A reading that is older is none: the driver does not answer any more."""

Readings = Mapping[str, float]
"""Numbers by the names of `workers.metrics.GPU_READINGS`."""


class GpuWatch:
    """Reads a GPU every few seconds while its block lasts.

    Args:
        read: gives what there is to be known. Whatever it raises ends the watch, with one line in the log.
    """

    def __init__(self, read: Callable[[], Readings], *, every_s: float = EVERY_S, stale_s: float = STALE_S) -> None:
        self._read = read
        self._every_s = every_s
        self._stale_s = stale_s
        self._readings: tuple[float, Readings] = (0.0, {})
        self._closed = threading.Event()
        # A daemon: who ends does not wait for a driver.
        self._thread = threading.Thread(target=self._watch, name="gpu-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()

    def latest(self) -> Readings:
        """The last readings, at once; empty when there are none, or none that are fresh."""
        read_s, readings = self._readings
        return readings if time.monotonic() - read_s < self._stale_s else {}

    def _watch(self) -> None:
        try:
            while not self._closed.is_set():
                readings = self._read()
                self._readings = (time.monotonic(), readings)
                self._closed.wait(self._every_s)
        except Exception as error:  # noqa: BLE001 - no metric is worth a worker
            logger.warning("the GPU cannot be watched: %s", error)


def nvml_reader(device: torch.device) -> Callable[[], Readings] | None:
    """What reads that device; None when it is no GPU, or the package nvidia-ml-py (extra `gpu`) is not installed."""
    if device.type != "cuda":
        return None
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        logger.info("no metrics of the GPU: they need the package nvidia-ml-py, as in multiworld-serving[gpu]")
        return None
    return NvmlReader(library, device).read


class NvmlReader:
    """
    Args:
        library: the module `pynvml`.
        device: CUDA's; found in NVML by its place on the PCI bus, for CUDA_VISIBLE_DEVICES renumbers one and not the other.
    """

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library = library
        self._device = device
        self._handle: Any = None

    def read(self) -> Readings:
        """All that this GPU can tell. Raises pynvml.NVMLError when it is not there."""
        nvml = self._library
        if self._handle is None:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id(self._device))
        sources: dict[str, Callable[[Any], float]] = {
            "gpu_utilization_ratio": lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu_memory_used_bytes": lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "gpu_memory_total_bytes": lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            "gpu_temperature_celsius": lambda handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu_power_watts": lambda handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,  # it says milliwatts
        }
        readings = {}
        for name, source in sources.items():
            try:
                readings[name] = float(source(self._handle))
            except nvml.NVMLError as error:
                logger.debug("%s is not told: %s", name, error)  # not every GPU, nor a part of one, tells everything
        return readings


def pci_bus_id(device: torch.device) -> str:
    """Where a CUDA device is, as NVML writes it: "00000000:3B:00.0"."""
    found: Any = torch.cuda.get_device_properties(device)  # typed without these three
    return f"{found.pci_domain_id:08X}:{found.pci_bus_id:02X}:{found.pci_device_id:02X}.0"
