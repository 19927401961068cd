"""Where compiled packages are unpacked: in a folder of each process's own, which others remove once it is gone, however it ended.

AOTInductor unpacks a package, frozen weights included, in `$TMPDIR`, and removes that only when the package is let go of. A process that is
killed would leave it there, for each batch size of each stage.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_LOCK = "held"
_PREFIX = "of-"

_ours: dict[tuple[Path, int], tuple[Path, TextIO]] = {}
"""By the folder that has it, and the process: a forked one makes its own. The lock is held as long as the file is open."""


@contextmanager
def unpacking_in(folder: Path) -> Iterator[None]:
    """While the block lasts, torch unpacks in a folder of ours below this one; where that cannot be had, where it always does."""
    try:
        ours = _own(folder)
    except OSError:
        yield
        return
    tempfile.gettempdir()  # keeps what it says first, and this is for torch alone
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(ours)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def _own(folder: Path) -> Path:
    """Raises OSError."""
    known = _ours.get((folder, os.getpid()))
    if known is None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as one_at_a_time:  # else one just made would be taken for one that was left
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            for other in folder.glob(f"{_PREFIX}*"):
                if _is_left(other):
                    shutil.rmtree(other, ignore_errors=True)
            ours = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
            held = (ours / _LOCK).open("w")
            fcntl.flock(held, fcntl.LOCK_EX)
        known = _ours[folder, os.getpid()] = ours, held
    return known[0]


def _is_left(folder: Path) -> bool:
    """Whether nobody holds it any more."""
    try:
        with (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:  # somebody does, or it is not ours to look at
        return False
    return True
