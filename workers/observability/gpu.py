"""Reads GPU metrics from NVML on a separate thread, so that a driver that hangs blocks nothing else."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import torch
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

_INTERVAL_S = 5.0
_STALE_S = 15.0
"""Readings older than this are dropped: the driver does not respond."""


class GpuCollector(Collector):
    """Reads one GPU periodically while its block runs, and exports the last readings. A failure ends the reading and is logged.

    Args:
        nvml: the module `pynvml`.
        device: the CUDA device; found in NVML by PCI bus id, because CUDA_VISIBLE_DEVICES renumbers CUDA devices only.
    """

    def __init__(
        self, nvml: Any, device: torch.device, *, interval_s: float = _INTERVAL_S, stale_s: float = _STALE_S
    ) -> None:
        self._nvml = nvml
        self._device = device
        self._interval_s = interval_s
        self._stale_s = stale_s
        self._last: tuple[float, list[Metric]] = (0.0, [])
        self._closed = threading.Event()

    @classmethod
    def of(cls, device: torch.device) -> GpuCollector | None:
        """For this device; None if it is not a GPU, or if nvidia-ml-py (extra `gpu`) is not installed."""
        if device.type != "cuda":
            return None
        try:
            return cls(importlib.import_module("pynvml"), device)
        except ImportError:
            logger.info("no GPU metrics: install nvidia-ml-py, for example with multiworld-serving[gpu]")
            return None

    def __enter__(self) -> Self:
        # A daemon, so that the process's exit does not wait for the driver.
        threading.Thread(target=self._watch, name="gpu-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()

    def collect(self) -> Iterator[Metric]:
        """See `Collector`. Nothing if there are no readings or they are stale."""
        read_s, metrics = self._last
        if time.monotonic() - read_s < self._stale_s:
            yield from metrics

    def _watch(self) -> None:
        try:
            self._nvml.nvmlInit()
            handle = self._nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id(self._device))
            while not self._closed.is_set():
                self._last = (time.monotonic(), list(self._read(handle)))
                self._closed.wait(self._interval_s)
        except Exception as error:  # noqa: BLE001 - metrics must not end a worker
            logger.warning("cannot read GPU metrics: %s", error)

    def _read(self, handle: Any) -> Iterator[Metric]:
        nvml = self._nvml
        readings: tuple[tuple[str, str, Callable[[], float]], ...] = (
            (
                "utilization_ratio",
                "Share of the last sample period in which the GPU was busy, for any process.",
                lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            ),
            (
                "memory_used_bytes",
                "Memory of the GPU in use, by any process.",
                lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            ),
            ("memory_total_bytes", "Memory of the GPU.", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total),
            (
                "temperature_celsius",
                "Temperature of the GPU.",
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ),
            ("power_watts", "Power draw of the GPU.", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        )
        for name, says, read in readings:
            try:
                value = read()
            except nvml.NVMLError as error:  # not every GPU or MIG slice supports everything
                logger.debug("%s is not available: %s", name, error)
                continue
            metric = GaugeMetricFamily(f"multiworld_gpu_{name}", says, labels=("device",))
            metric.add_metric((str(self._device),), value)
            yield metric


def pci_bus_id(device: torch.device) -> str:
    """The PCI bus id of a CUDA device in NVML's format: "00000000:3B:00.0"."""
    found: Any = torch.cuda.get_device_properties(device)  # torch's types lack these attributes
    return f"{found.pci_domain_id:08X}:{found.pci_bus_id:02X}:{found.pci_device_id:02X}.0"
