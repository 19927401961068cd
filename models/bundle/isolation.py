"""Runs a check in a process of its own, so that a graph which crashes a kernel or exhausts the memory ends only that process."""

from __future__ import annotations

import faulthandler
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from multiworld_serving.models.errors import BundleError

_DEADLINE_S = 300
"""Longest time of a check. Large graphs take seconds."""
_MEMORY_BYTES = 4 << 30
"""What a check may allocate."""
_MAX_REPLY_BYTES = 1 << 16


def check_in_child(check: Callable[[], None], *, deadline_s: float = _DEADLINE_S) -> None:
    """Run `check` in a forked process with limits for memory and time. Blocks until it has ended.

    Raises:
        BundleError: the check has raised an exception, has exceeded a limit, or a signal has ended its process.
    """
    read_fd, write_fd = os.pipe()
    with warnings.catch_warnings():
        # Of threads: the check computes on tensors without data, for which torch starts no thread and takes no lock for long.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        _run(check, write_fd)
    os.close(write_fd)
    try:
        reply = _read(read_fd, time.monotonic() + deadline_s)
    finally:
        os.close(read_fd)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if reply is None:
        raise BundleError(
            f"invalid graph: it cannot be checked within {deadline_s:g} s; split the model, or export it again"
        )
    if status > 0:
        raise BundleError(reply.decode(errors="replace"))
    if reply != b"ok":
        name = signal.Signals(-status).name if status else "no reply"
        raise BundleError(f"invalid graph: the process that checked it ended with {name}; export the model again")


def _read(fd: int, deadline_s: float) -> bytes | None:
    """What the process writes until it closes the pipe; None if it does not in time."""
    reply, poll = b"", select.poll()
    poll.register(fd, select.POLLIN)
    while len(reply) < _MAX_REPLY_BYTES:
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            return None
        if not (found := os.read(fd, _MAX_REPLY_BYTES)):
            break
        reply += found
    return reply


def _run(check: Callable[[], None], write_fd: int) -> NoReturn:
    """The forked process."""
    status, reply = 1, b"the check has ended without a result"
    try:
        faulthandler.disable()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + _MEMORY_BYTES)
        _limit(resource.RLIMIT_CPU, _DEADLINE_S)
        _limit(resource.RLIMIT_CORE, 0)
        check()
        status, reply = 0, b"ok"
    except BundleError as error:
        reply = str(error).encode()
    except MemoryError:
        reply = b"invalid graph: checking it takes more than 4 GiB of memory"
    except BaseException as error:  # noqa: BLE001 - the process ends here
        reply = f"invalid graph: it cannot be checked ({type(error).__name__}: {str(error)[:200]})".encode()
    finally:
        with suppress(OSError):
            os.write(write_fd, reply[:_MAX_REPLY_BYTES])
        os._exit(status)


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
