"""Limits of the process: those that the programs set at their start, and the memory that is left to it."""

import ctypes
import resource
import signal
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = "max"
_PR_SET_PDEATHSIG = 1


def raise_descriptor_limit() -> None:
    """Allow as many open files as the system lets this process have.

    Every connection of a stranger to the port of a Gloo group holds a descriptor for as long as the process lives, and Gloo ends the
    process that has none left: a shell's usual 1,024 are few.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent has ended, even one that is stopped. Raises OSError where it cannot.

    To be called at the start; whether the parent lives then is to be found out afterwards.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this system does not end processes with their parents")


def check_memory(needed_bytes: int) -> None:
    """Raises MemoryError when so much cannot be had: a polite end of one piece of work, where the kernel would end the process.

    It is a look, not a reservation: what others take in the next moment is not foreseen. Where nothing is known, all is well.
    """
    available_bytes = min((found for found in (_in_container(), _on_machine()) if found is not None), default=None)
    if available_bytes is not None and needed_bytes > available_bytes:
        raise MemoryError(f"it takes {needed_bytes / 1e6:.0f} MB, and {available_bytes / 1e6:.0f} MB are left")


def _on_machine() -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _in_container() -> int | None:
    """What the control group still allows, files in the page cache not counted: those make room."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == _UNLIMITED:
            return None
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(statistics["inactive_file"])
    except (OSError, KeyError, ValueError):
        return None
