"""Process groups made from stock torch, without the global one: build, abort, and nothing else.

The facts this rests on (what aborts a Gloo group, what its constructor waits for) are in docs/decisions/0002-worlds-on-stock-torch.md.
"""

import contextlib
import functools
import logging
import os
import threading
from datetime import timedelta

import torch
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroup, ProcessGroupGloo, Store

logger = logging.getLogger(__name__)

FOREVER = timedelta(days=3650)
"""The deadline of an operation that has none of its own: the watchdog decides, not the clock."""
_CONNECT_S = 5.0
"""How long Gloo waits for a connection, five times over, where nothing can interrupt it. All members are known to be there by then."""
LINES = "lines"
"""The backend of a world whose members connect as the lines do, and no other way: c10d opens no port and no connection."""
_POISON_TAG = 0x7FFF_FFF1
"""Reserved: nothing is ever sent with it."""
_POISON_WAIT = timedelta(milliseconds=1)

_NCCL_ABORT_S = 10.0
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else an error in one world ends the process with all its worlds
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a monitor ends a process in which NCCL does not move
    "TORCH_DIST_USE_NCCL2": "0",  # the class behind the registered name in torch 2.15 has other options
}
"""Must stand before NCCL's first use."""


class UnsupportedBackendError(ValueError):
    """The backend is not in this build of torch, or not known here."""


def parse_backend(backend: str) -> dict[str, str]:
    """`"gloo"`, `"nccl"` or c10d's `"cpu:gloo,cuda:nccl"` as a mapping from device type to backend; `"lines"` is none at all.

    Raises UnsupportedBackendError.
    """
    if backend.strip().lower() == LINES:
        return {}
    parts = {"gloo": "cpu:gloo", "nccl": "cuda:nccl"}.get(backend.strip().lower(), backend.strip().lower())
    chosen: dict[str, str] = {}
    for part in parts.split(","):
        device, _, name = part.strip().partition(":")
        if (device, name) not in {("cpu", "gloo"), ("cuda", "gloo"), ("cuda", "nccl")}:
            raise UnsupportedBackendError(
                f"unknown backend {backend!r}: expected 'gloo', 'nccl', a list such as 'cpu:gloo,cuda:nccl', or '{LINES}' "
                "for messages, all_reduce and barrier alone"
            )
        chosen[device] = name
    if "nccl" in chosen.values() and not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        raise UnsupportedBackendError("backend 'nccl' needs a CUDA device and a torch build with NCCL; use 'gloo' here")
    return chosen


@functools.cache
def _gloo_device(host: str, _pid: int) -> object:
    """One Gloo device an address and process: worlds share its thread and its listening socket, and nothing else.

    A forked child has no use for its parent's, which has lost its thread.
    """
    return ProcessGroupGloo.create_device(hostname=host)


def make_process_group(
    store: Store, rank: int, size: int, backends: dict[str, str], host: str, timeout_s: float, device: torch.device
) -> ProcessGroup:
    """Build the group of one world. Blocks until all ranks have built theirs: call it in a thread.

    Args:
        host: our address as the other ranks reach it.
        timeout_s: how long each missing peer is waited for.
    Raises:
        RuntimeError: a peer did not come, or the store was aborted.
    """
    group = ProcessGroup(store, rank, size)
    gloo: ProcessGroupGloo | None = None
    for device_type, name in backends.items():
        if name == "gloo":
            gloo = gloo or _make_gloo(store, rank, size, host, timeout_s)
            group._register_backend(torch.device(device_type), ProcessGroup.BackendType.GLOO, gloo)
        else:
            _register_nccl(group, store, rank, size, timeout_s, device)
    if gloo is not None:
        if "cpu" not in backends:  # tensors of other devices cross through host memory
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group


def _make_gloo(store: Store, rank: int, size: int, host: str, timeout_s: float) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from torch's stub
    options._devices = [_gloo_device(host, os.getpid())]
    options._timeout = timedelta(seconds=min(timeout_s, _CONNECT_S))
    options._threads = 1
    return ProcessGroupGloo(store, rank, size, options)


def _register_nccl(
    group: ProcessGroup, store: Store, rank: int, size: int, timeout_s: float, device: torch.device
) -> None:
    """Written from torch's source and documentation; never run by us on more than one GPU."""
    for name, value in _NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 - absent from builds without CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 0
    nccl = ProcessGroupNCCL(store, rank, size, options)
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)
    if device.type != "cuda" or device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    nccl.eager_connect_single_device(device)
    with torch.cuda.device(device):  # what connects lazily all the same connects now, not on somebody's event loop
        group.allreduce([torch.zeros(1, device=device)], AllreduceOptions()).wait()
        torch.cuda.current_stream(device).synchronize()


def abort_process_group(group: ProcessGroup, rank: int, size: int, backends: dict[str, str]) -> None:
    """Make everything pending in `group` fail, here at once and at its peers within some 20 ms. Call it in a thread.

    Gloo's own abort() wakes nobody. What does is an operation that runs into its timeout: Gloo then closes every connection of the
    group. NCCL has a real abort, which can hang.
    """
    if "gloo" in backends.values():
        for turn in range(1, size):
            # Every peer: where one has closed its connection before, this fails of that, at once, and closes none of the others.
            with contextlib.suppress(RuntimeError):  # that it fails is the point
                group.recv([torch.empty(1, dtype=torch.uint8)], (rank + turn) % size, _POISON_TAG).wait(_POISON_WAIT)
    if "nccl" in backends.values():
        aborting = threading.Thread(target=_abort_nccl, args=(group,), name="multiworld-nccl-abort", daemon=True)
        aborting.start()
        aborting.join(_NCCL_ABORT_S)
        if aborting.is_alive():
            logger.error("NCCL did not abort within %.0f s; its thread is left behind", _NCCL_ABORT_S)


def _abort_nccl(group: ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError):
        group._get_backend(torch.device("cuda")).abort()
