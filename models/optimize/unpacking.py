"""Unpacks compiled packages into a folder per process, which other processes remove after that process has ended.

AOTInductor unpacks a package, including frozen weights, into `$TMPDIR` and removes it only when the package is freed. A process that is
killed would leave the files behind.
"""

import ctypes
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

_LOCK = "held"
_PREFIX = "of-"
_MADV_PAGEOUT = 21

_ours: dict[tuple[Path, int], tuple[Path, TextIO]] = {}
"""By parent folder and process id, because a forked process needs its own. The lock is held while the file is open."""


@contextmanager
def unpack_under(folder: Path) -> Iterator[None]:
    """Make torch unpack into this process's folder below `folder` while the block runs; no effect if it cannot be created."""
    try:
        ours = _own(folder)
    except OSError:
        yield
        return
    tempfile.gettempdir()  # caches its result first, so that the change affects only torch
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(ours)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def page_out(folder: Path) -> None:
    """Release the pages of this process's libraries below `folder`; the kernel reads them again when they are used.

    A library of AOTInductor contains the weights, which it copies when it is loaded.
    """
    with suppress(
        OSError, AttributeError
    ):  # no /proc, or another C library: the pages stay until the kernel needs memory
        advise = ctypes.CDLL(None).madvise
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if fields[-1].startswith(f"{folder}/"):
                begin, end = (int(address, 16) for address in fields[0].split("-"))
                advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_PAGEOUT)


def _own(folder: Path) -> Path:
    """Raises OSError."""
    known = _ours.get((folder, os.getpid()))
    if known is None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as one_at_a_time:  # a folder that was just created is not locked yet
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            for other in folder.glob(f"{_PREFIX}*"):
                if _is_abandoned(other):
                    shutil.rmtree(other, ignore_errors=True)
            ours = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
            held = (ours / _LOCK).open("w")
            fcntl.flock(held, fcntl.LOCK_EX)
        known = _ours[folder, os.getpid()] = ours, held
    return known[0]


def _is_abandoned(folder: Path) -> bool:
    """Whether its process has ended."""
    try:
        with (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:  # locked by its process, or not accessible
        return False
    return True
