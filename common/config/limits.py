"""Process limits that the programs set at start-up, and the memory that is available."""

import ctypes
import resource
import signal
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = "max"
_PR_SET_PDEATHSIG = 1


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit.

    Gloo keeps a descriptor for every unauthenticated connection to its port until the process exits, and aborts the process when none is
    left. A shell's default of 1,024 is too low.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def kill_on_parent_death() -> None:
    """Have the kernel kill this process when its parent dies, even if this process is stopped. Raises OSError if unsupported.

    Call it at start-up, and check afterwards that the parent is still alive.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def check_memory(needed_bytes: int) -> None:
    """Raise MemoryError if `needed_bytes` are not available, so that one job fails instead of the OOM killer ending the process.

    This checks and does not reserve: other processes may allocate afterwards. Does nothing if the available memory is unknown.
    """
    available_bytes = min((found for found in (_in_container(), _on_machine()) if found is not None), default=None)
    if available_bytes is not None and needed_bytes > available_bytes:
        raise MemoryError(f"needs {needed_bytes / 1e6:.0f} MB, but only {available_bytes / 1e6:.0f} MB are available")


def _on_machine() -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _in_container() -> int | None:
    """Memory left in the control group. Inactive page cache counts as available, because the kernel reclaims it."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == _UNLIMITED:
            return None
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(statistics["inactive_file"])
    except (OSError, KeyError, ValueError):
        return None
