"""Builds and aborts process groups of stock PyTorch, without the global default group.

The required facts about c10d (how to abort a Gloo group, what its constructor waits for) are in
docs/decisions/0002-worlds-on-stock-torch.md.
"""

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroup, ProcessGroupGloo, Store, Work

logger = logging.getLogger(__name__)

FOREVER = timedelta(days=3650)
"""Timeout that c10d is given for operations. Failures are detected by heartbeats, not by this timeout."""
_CONNECT_S = 5.0
"""Seconds that Gloo waits for a connection, in up to five attempts that cannot be interrupted. All members have joined by then."""
TCP = "tcp"
"""Backend: collectives use the library's own connections. c10d then has no backend, port, connection or thread."""
GLOO = "c10d-gloo"
"""Backend: collectives use Gloo of c10d. Only on request of the caller, see docs/decisions/0023."""
NCCL = "nccl"
"""Backend: all operations on CUDA tensors use NCCL of c10d."""
_ABORT_TAG = 0x7FFF_FFF1
"""Tag of the receive whose timeout aborts a Gloo group. No message has this tag."""
_ABORT_WAIT = timedelta(milliseconds=1)

NCCL_ABORT_S = 10.0
"""Seconds until an abort of NCCL counts as hung."""
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else an error in one world ends the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a monitor thread ends a process in which NCCL hangs
    "TORCH_DIST_USE_NCCL2": "0",  # in torch 2.15 the class registered for NCCL has other options
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",  # else a thread waits 30 minutes for a member that failed while connecting
}
"""Environment variables that must be set before the first use of NCCL. Values that are already set are kept."""
NCCL_POLL_S = 0.0005
"""Seconds between polls for the completion of NCCL operations."""


_BACKENDS = {"gloo": TCP, TCP: TCP, GLOO: GLOO, NCCL: NCCL}
"""Backend by the name that the caller passes."""


_Options = TypeVar("_Options")


class UnsupportedBackendError(ValueError):
    """The backend is unknown or not available in this build of torch."""


def parse_backend(backend: str) -> dict[str, str]:
    """Parse a backend name, or a list as in c10d such as `"cpu:gloo,cuda:nccl"`.

    Returns device type → `TCP`, `GLOO` or `NCCL`. `"gloo"`, which programs for c10d and pymultiworld use, means `TCP`.
    Raises UnsupportedBackendError.
    """
    parts = backend.strip().lower()
    if parts in _BACKENDS:
        parts = f"cuda:{parts}" if parts == NCCL else f"cpu:{parts}"
    chosen: dict[str, str] = {}
    for part in parts.split(","):
        device, _, name = part.strip().partition(":")
        if device not in {"cpu", "cuda"} or name not in _BACKENDS or (device, name) == ("cpu", NCCL):
            raise UnsupportedBackendError(
                f"unknown backend {backend!r}: expected 'gloo', 'nccl', a list such as 'cpu:gloo,cuda:nccl', or '{GLOO}' "
                "for PyTorch's own Gloo"
            )
        chosen[device] = _BACKENDS[name]
    if NCCL in chosen.values() and not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        raise UnsupportedBackendError("backend 'nccl' needs a CUDA device and a torch build with NCCL; use 'gloo' here")
    return chosen


def without_timeout(options: _Options, **fields: Any) -> _Options:
    """Set fields of c10d's options of a collective, and its timeout to `FOREVER`. Returns `options`."""
    for name, value in {"timeout": FOREVER, **fields}.items():
        setattr(options, name, value)
    return options


def check_nccl_device(device: torch.device) -> torch.device:
    """The CUDA device for NCCL, with an index: the current device unless `device` has an index.

    Raises ValueError when the device does not exist.
    """
    index = device.index if device.type == "cuda" else None
    count = torch.cuda.device_count()
    if index is not None and index >= count:
        raise ValueError(f"device {device} does not exist: expected an index below {count}, the number of CUDA devices")
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


@functools.cache
def _gloo_device(host: str, _pid: int) -> object:
    """The Gloo device of an address, cached per process. Worlds share its thread and listening socket.

    The process id is part of the key because a forked child does not have the thread of its parent's device.
    """
    return ProcessGroupGloo.create_device(hostname=host)


def make_process_group(
    store: Store,
    rank: int,
    size: int,
    backends: dict[str, str],
    host: str,
    timeout_s: float,
    device: torch.device | None,
    check: Callable[[], None],
) -> ProcessGroup:
    """Build the process group of one world. Blocks until all ranks build theirs (not with `TCP` alone), so call it on a thread.

    Args:
        backends: device type → `TCP`, `GLOO` or `NCCL`.
        host: address of this member at which the other ranks can connect.
        timeout_s: seconds to wait for each missing peer.
        device: the CUDA device for NCCL, with an index; None without NCCL.
        check: raises the error that the world ended with, if it ended. Polled because NCCL does not detect the end.
    Raises:
        RuntimeError: a peer did not connect, or the store was aborted.
    """
    group = ProcessGroup(store, rank, size)
    gloo: ProcessGroupGloo | None = None
    for device_type, name in backends.items():
        if name == GLOO:
            gloo = gloo or _make_gloo(store, rank, size, host, timeout_s)
            group._register_backend(torch.device(device_type), ProcessGroup.BackendType.GLOO, gloo)
        elif name == NCCL:
            assert device is not None
            _register_nccl(group, store, rank, size, timeout_s, device, check)
    if gloo is not None:
        if "cpu" not in backends:  # tensors of other devices are copied through host memory
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
    group: ProcessGroup,
    store: Store,
    rank: int,
    size: int,
    timeout_s: float,
    device: torch.device,
    check: Callable[[], None],
) -> None:
    """Create the NCCL backend and connect all ranks. Not tested by the project on more than one GPU (docs/gpu.md).

    On an error, aborts the backend and raises.
    """
    for name, value in _NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 - absent from builds without CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 0
    nccl = ProcessGroupNCCL(store, rank, size, options)
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)
    try:
        nccl.eager_connect_single_device(device)
        check()
        with torch.cuda.device(device):  # complete lazy connection setup here, not on an event loop
            connecting = group.allreduce([torch.zeros(1, device=device)], AllreduceOptions())
        wait_for_nccl(connecting, check)
    except BaseException:
        _abort_nccl_in_time(group)  # else its kernel keeps waiting on the GPU for a failed member
        raise


def wait_for_nccl(work: Work, check: Callable[[], None]) -> None:
    """Poll until `work` completes; `check` is called before each sleep and may raise. Raises RuntimeError when the operation failed."""
    while not work.is_completed():
        check()
        time.sleep(NCCL_POLL_S)
    work.wait()  # raises the error of the operation; orders the current stream after it


def abort_process_group(group: ProcessGroup, rank: int, size: int, backends: dict[str, str]) -> None:
    """Make all pending operations of `group` fail, at this member within milliseconds and at its peers within about 20 ms.

    May block: call it on a thread, and wait for the thread with a deadline only. abort() of Gloo does not wake pending operations, but an
    operation that times out does: Gloo then closes all connections of the group. A Gloo worker that waits for its own send to peers that
    have all closed is not woken, and the destructor of the group waits for it. NCCL supports abort, which can hang.
    """
    if GLOO in backends.values():
        for distance in range(1, size):
            # For every peer: if a peer has already closed its connection, this fails at once and does not close the others.
            with contextlib.suppress(RuntimeError):  # the timeout is intended
                group.recv([torch.empty(1, dtype=torch.uint8)], (rank + distance) % size, _ABORT_TAG).wait(_ABORT_WAIT)
    if NCCL in backends.values():
        _abort_nccl_in_time(group)


def _abort_nccl_in_time(group: ProcessGroup) -> None:
    """Abort NCCL on a daemon thread, because the abort can hang. Waits at most `NCCL_ABORT_S` seconds, then leaves the thread running."""
    aborting = threading.Thread(target=_abort_nccl, args=(group,), name="multiworld-nccl-abort", daemon=True)
    aborting.start()
    aborting.join(NCCL_ABORT_S)
    if aborting.is_alive():
        logger.error("NCCL did not abort within %.0f s; its thread keeps running", NCCL_ABORT_S)


def _abort_nccl(group: ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError):
        group._get_backend(torch.device("cuda")).abort()
