"""What a worker tells leaders about its device: how fast it is and how much memory is free."""

import time

import torch

from multiworld_serving.common.config import available_memory_bytes
from multiworld_serving.models import torch_threads

_ROUNDS = 5
_CHANNELS, _SIZE, _KERNEL = 64, 56, 3
"""Of a convolution as in the first blocks of a ResNet."""


@torch.inference_mode()
def measured_gflops(device: torch.device, threads: int) -> float:
    """Speed of a convolution in float32, in 10^9 operations per second. Takes about 30 ms.

    On a CPU the CPU time of one thread is measured and multiplied, because other workers of the machine may be computing. Not run on a GPU.

    Args:
        threads: on which a batch is computed on a CPU if all workers of the machine are busy.
    """
    rows = 1 if device.type == "cpu" else 64
    batch = torch.ones(rows, _CHANNELS, _SIZE, _SIZE, device=device)
    weight = torch.ones(_CHANNELS, _CHANNELS, _KERNEL, _KERNEL, device=device)
    operations = 2 * rows * _CHANNELS**2 * _SIZE**2 * _KERNEL**2
    clock_s = time.thread_time if device.type == "cpu" else time.perf_counter
    times_s = []
    with torch_threads(1):
        for _ in range(_ROUNDS):
            began_s = clock_s()
            torch.conv2d(batch, weight, padding=1).flatten()[0].item()  # waits for a GPU
            times_s.append(clock_s() - began_s)
    return operations / min(times_s) / 1e9 * (threads if device.type == "cpu" else 1)


def free_memory_mb(device: torch.device) -> int:
    """Free memory of the device, in 10^6 bytes; 0 if it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 10**6
    return (available_memory_bytes() or 0) // 10**6
