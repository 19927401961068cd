"""The device and its libraries, and copies between its memory and shared memory."""

import ctypes
import os
import platform
import resource
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.gpu.setup import NeedsGpuError, Setup
from multiworld.transport.memory import HostMemory
from multiworld.transport.segments import SegmentPool
from multiworld_serving.workers.compute.pinned_memory import PinnedMemory
from multiworld_serving.workers.compute.transfers import GpuTransfers, Transfers

_MIB = 1 << 20
_HOLD_CONTEXT = "import torch, time; torch.zeros(1, device='{device}'); print('ready', flush=True); time.sleep(60)"


def driver(setup: Setup) -> None:
    """Versions, flags, limits, and the memory that a process needs on the device before it loads a model."""
    setup.add("date", time.strftime("%Y-%m-%d %H:%M"))
    setup.add("machine", {"kernel": platform.release(), "cores": setup.cores, "python": platform.python_version()})
    setup.add("torch", {"version": torch.__version__, "cuda": torch.version.cuda, "cudnn": _cudnn_version()})
    setup.add(
        "TF32 by default", {"cuDNN": torch.backends.cudnn.allow_tf32, "cuBLAS": torch.backends.cuda.matmul.allow_tf32}
    )
    setup.add("locked memory in bytes", resource.getrlimit(resource.RLIMIT_MEMLOCK))
    setup.add(
        "environment", {name: os.environ[name] for name in sorted(os.environ) if "NCCL" in name or "CUDA" in name}
    )
    if not setup.on_gpu:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - it is the result
            setup.add("no CUDA because", str(error))
    setup.require_gpu("a device to describe")
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    properties = torch.cuda.get_device_properties(setup.device)
    setup.add("driver supports CUDA", version.value)
    setup.add("NCCL", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    setup.add("device", {"name": properties.name, "capability": f"{properties.major}.{properties.minor}"})
    setup.add("devices", torch.cuda.device_count())
    setup.add("bfloat16 in hardware", torch.cuda.is_bf16_supported(including_emulation=False))
    free, total = torch.cuda.mem_get_info(setup.device)
    setup.add("memory in MiB", {"total": total // _MIB, "free": free // _MIB})
    setup.add("memory of a bare process in MiB", _bare_process_mib(setup.device))


def _cudnn_version() -> Any:
    cudnn: Any = torch.backends.cudnn
    return cudnn.version() if cudnn.is_available() else None


def _bare_process_mib(device: str) -> float:
    before, _ = torch.cuda.mem_get_info(device)
    command = [sys.executable, "-c", _HOLD_CONTEXT.format(device=device)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        after, _ = torch.cuda.mem_get_info(device)
        other.kill()
    return (before - after) / _MIB


def copies(setup: Setup) -> None:
    """GB/s to the device and back as workers copy: into pinned shared memory, on a stream of their own. On a CPU nothing is pinned."""
    device = torch.device(setup.device)
    transfers = GpuTransfers(device) if setup.on_gpu else Transfers()
    register = PinnedMemory(device).register if setup.on_gpu else None
    rounds = 2 if setup.small else 20
    for mib in (1, 4) if setup.small else (1, 4, 16, 64):
        pool = SegmentPool(4 * mib * _MIB, memory=HostMemory(register))
        batch = pool.allocate((mib * _MIB // 4,), torch.float32).fill_(1.0)
        there = transfers.to_device(batch)()
        transfers.to_host(there, allocate=pool.allocate)
        began_s = time.perf_counter()
        for _ in range(rounds):
            there = transfers.to_device(batch)()
            _wait(device)
        to_device_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        for _ in range(rounds):
            back = transfers.to_host(there, allocate=pool.allocate)
        to_host_s = time.perf_counter() - began_s
        if not torch.equal(back, batch):
            raise RuntimeError(f"{mib} MiB came back changed")
        moved_gb = rounds * batch.nbytes / 1e9
        setup.add(
            f"{mib} MiB",
            {
                "to device GB/s": round(moved_gb / to_device_s, 2),
                "to host GB/s": round(moved_gb / to_host_s, 2),
                "input is pinned": setup.on_gpu and batch.is_pinned(),
                "output is pinned": setup.on_gpu and back.is_pinned(),
            },
        )
        del batch, there, back
        pool.close()
    if not setup.on_gpu:
        raise NeedsGpuError("copies within the memory of the host were measured")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_used_mib(device: str) -> float:
    """Memory of the device that all processes use; of the host, nothing."""
    if not device.startswith("cuda"):
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / _MIB
