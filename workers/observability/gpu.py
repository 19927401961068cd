"""Reads GPU metrics from NVML on a separate thread, so that a driver that hangs blocks nothing else."""

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

INTERVAL_S = 5.0
STALE_S = 15.0
"""Readings older than this are dropped: the driver does not respond."""

Readings = Mapping[str, float]
"""Values by metric name; see `multiworld_serving.workers.observability.metrics.GPU_READINGS`."""


class GpuSampler:
    """Reads a GPU periodically while its block runs.

    Args:
        read: returns the readings. An exception ends the sampling and is logged once.
    """

    def __init__(
        self, read: Callable[[], Readings], *, interval_s: float = INTERVAL_S, stale_s: float = STALE_S
    ) -> None:
        self._read = read
        self._every_s = interval_s
        self._stale_s = stale_s
        self._readings: tuple[float, Readings] = (0.0, {})
        self._closed = threading.Event()
        # A daemon, so that the process's exit does not wait for the driver.
        self._thread = threading.Thread(target=self._watch, name="gpu-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()

    def latest(self) -> Readings:
        """The last readings, without blocking; empty if there are none or they are stale."""
        read_s, readings = self._readings
        return readings if time.monotonic() - read_s < self._stale_s else {}

    def _watch(self) -> None:
        try:
            while not self._closed.is_set():
                readings = self._read()
                self._readings = (time.monotonic(), readings)
                self._closed.wait(self._every_s)
        except Exception as error:  # noqa: BLE001 - metrics must not end a worker
            logger.warning("cannot read GPU metrics: %s", error)


def nvml_reader(device: torch.device) -> Callable[[], Readings] | None:
    """A function that reads this device; None if it is not a GPU, or if nvidia-ml-py (extra `gpu`) is not installed."""
    if device.type != "cuda":
        return None
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        logger.info("no GPU metrics: install nvidia-ml-py, for example with multiworld-serving[gpu]")
        return None
    return NvmlReader(library, device).read


class NvmlReader:
    """Reads one GPU through NVML.

    Args:
        library: the module `pynvml`.
        device: the CUDA device; found in NVML by PCI bus id, because CUDA_VISIBLE_DEVICES renumbers CUDA devices only.
    """

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library = library
        self._device = device
        self._handle: Any = None

    def read(self) -> Readings:
        """All readings that this GPU supports. Raises pynvml.NVMLError if the GPU is not found."""
        nvml = self._library
        if self._handle is None:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id(self._device))
        sources: dict[str, Callable[[Any], float]] = {
            "gpu_utilization_ratio": lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu_memory_used_bytes": lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "gpu_memory_total_bytes": lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            "gpu_temperature_celsius": lambda handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu_power_watts": lambda handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,  # milliwatts
        }
        readings = {}
        for name, source in sources.items():
            try:
                readings[name] = float(source(self._handle))
            except nvml.NVMLError as error:
                logger.debug("%s is not available: %s", name, error)  # not every GPU or MIG slice supports everything
        return readings


def pci_bus_id(device: torch.device) -> str:
    """The PCI bus id of a CUDA device in NVML's format: "00000000:3B:00.0"."""
    found: Any = torch.cuda.get_device_properties(device)  # torch's types lack these attributes
    return f"{found.pci_domain_id:08X}:{found.pci_bus_id:02X}:{found.pci_device_id:02X}.0"
