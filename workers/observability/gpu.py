"""Reads GPU metrics on a separate thread, so that a driver that hangs blocks nothing else. Most are read from NVML (nvidia-ml-py)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from multiworld_serving.workers.devices import pci_address

logger = logging.getLogger(__name__)

_INTERVAL_S = 5.0
_STALE_S = 15.0
"""Readings older than this are dropped: the driver does not respond."""
_SENSOR = 0
"""NVML_TEMPERATURE_GPU."""


def _memory_used(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _nvml(what: str, device: torch.device, *arguments: int) -> Any:
    """Ask NVML about the whole GPU, which it knows by its address: its numbers are not those of CUDA. Raises ImportError, NVMLError."""
    import pynvml  # noqa: PLC0415 - optional

    pynvml.nvmlInit()  # counts its calls
    return getattr(pynvml, f"nvmlDeviceGet{what}")(
        pynvml.nvmlDeviceGetHandleByPciBusId(pci_address(device)), *arguments
    )


Readings = Mapping[str, tuple[str, Callable[[torch.device], float]]]
"""Description and function by name."""
_READINGS: Readings = {
    "utilization_ratio": (
        "Share of the last sample period in which the GPU was busy, for any process.",
        lambda device: _nvml("UtilizationRates", device).gpu / 100,
    ),
    "memory_used_bytes": (
        "Memory of the GPU or MIG slice in use, by any process.",
        _memory_used,
    ),
    "memory_total_bytes": ("Memory of the GPU or MIG slice.", lambda device: torch.cuda.mem_get_info(device)[1]),
    "temperature_celsius": ("Temperature of the GPU.", lambda device: _nvml("Temperature", device, _SENSOR)),
    "power_watts": ("Power draw of the GPU.", lambda device: _nvml("PowerUsage", device) / 1000),
}


class GpuCollector(Collector):
    """Reads one GPU periodically and exports the last readings. What cannot be read is logged once."""

    def __init__(
        self,
        device: torch.device,
        readings: Readings = _READINGS,
        *,
        interval_s: float = _INTERVAL_S,
        stale_s: float = _STALE_S,
    ) -> None:
        self._device = device
        self._readings = readings
        self._interval_s = interval_s
        self._stale_s = stale_s
        self._last: tuple[float, list[Metric]] = (0.0, [])
        self._missing: set[str] = set()

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Read while the block runs. Its end does not wait for the driver."""
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(ended,), name="gpu-watch", daemon=True).start()
        try:
            yield self
        finally:
            ended.set()

    def collect(self) -> Iterator[Metric]:
        """See `Collector`. Nothing if there are no readings or they are stale."""
        read_s, metrics = self._last
        if time.monotonic() - read_s < self._stale_s:
            yield from metrics

    def _watch(self, ended: threading.Event) -> None:
        while not ended.is_set():
            self._last = (time.monotonic(), list(self._read()))
            ended.wait(self._interval_s)

    def _read(self) -> Iterator[Metric]:
        for name, (says, read) in self._readings.items():
            try:
                value = read(self._device)
            except Exception as error:  # noqa: BLE001 - nvidia-ml-py is optional, and not every GPU or MIG slice supports everything
                if name not in self._missing:
                    logger.info("no metric multiworld_gpu_%s: %s", name, error)
                self._missing.add(name)
                continue
            metric = GaugeMetricFamily(f"multiworld_gpu_{name}", says, labels=("device",))
            metric.add_metric((str(self._device),), value)
            yield metric
