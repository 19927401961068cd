"""Ends a process that cannot continue: an orderly exit with a deadline, enforced by the kernel."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

from multiworld_serving.common.threads import thread_while

logger = logging.getLogger(__name__)

EXIT_STUCK = 70
"""Exit status of a process that cannot continue."""
EXIT_DEVICE_FAILED = 71
"""Exit status of a process whose GPU has failed: only a new process can use the GPU again, if any can."""
GRACEFUL_EXIT_S = 10.0
"""Deadline for an orderly exit while something in the process hangs."""
OUT_OF_MEMORY_EXIT_S = 1.0
"""Deadline after running out of memory: enough to tell the leader about the batch. An orderly exit has never succeeded in this state."""
LOOP_BLOCKED_MARGIN_S = 5.0
"""Added to `loop_stall_timeout_s`, so that the leaders report the cause `stalled` before the process exits."""
_LOOP_CHECK_S = 0.5
_STICKY_CUDA_ERRORS = (
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "device-side assert triggered",
    "hardware stack error",
    "invalid program counter",
    "misaligned address",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error",
    "unspecified launch failure",
    "operation not supported on global/shared address space",
)
"""Texts of the CUDA errors after which every further call of the process fails ("CUDA Runtime API", error types: "To continue using
CUDA, the process must be terminated and relaunched")."""


def arm_exit_timer(seconds: float) -> None:
    """Have the kernel kill this process by SIGALRM after `seconds` if it has not exited. Needs no memory. Callable from any thread."""
    if not 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that the host is out of memory. Any callback may have been lost after that.

    torch raises RuntimeError from its CPU allocator or for std::bad_alloc. Out of memory on a GPU does not count.
    """
    message = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and ("DefaultCPUAllocator: can't allocate memory" in message or "bad_alloc" in message)
    )


def is_device_failure(error: BaseException) -> bool:
    """Whether the error means that this process can never use its GPU again. Out of memory on a GPU does not count.

    Checked against the texts of CUDA's errors; never seen on a GPU.
    """
    message = str(error)
    return (
        isinstance(error, RuntimeError)
        and "CUDA error" in message
        and any(map(message.__contains__, _STICKY_CUDA_ERRORS))
    )


def handle_loop_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Arm the exit timer when a callback of this loop runs out of memory: its work is lost, and its waiters have no timeout."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and is_out_of_memory(error):
            arm_exit_timer(OUT_OF_MEMORY_EXIT_S)
        loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


@contextlib.contextmanager
def exit_when_blocked(loop: asyncio.AbstractEventLoop, limit_s: float) -> Iterator[None]:
    """While the block runs, end the process when `loop` runs no callbacks for `limit_s` seconds. Called on the loop's thread.

    The leader can only drop its link to such a process; a supervisor replaces a process that has ended. Loading, computing and compiling
    run on other threads and do not block the loop. The thread counts its own turns, so time during which the whole process was stopped
    does not count.
    """
    loop_thread, answered = threading.get_ident(), threading.Event()
    answered.set()

    def watch(ended: threading.Event) -> None:
        blocked_s = 0.0
        while not ended.wait(_LOOP_CHECK_S):
            if answered.is_set():
                blocked_s = 0.0
                answered.clear()
                loop.call_soon_threadsafe(answered.set)
            else:
                blocked_s += _LOOP_CHECK_S
            if blocked_s >= limit_s:
                _exit_blocked(loop_thread, blocked_s)

    with thread_while(watch, "loop-watch"):
        yield


def _exit_blocked(loop_thread: int, blocked_s: float) -> None:
    arm_exit_timer(1.0)  # the blocked thread may hold a lock that logging needs
    frame = sys._current_frames().get(loop_thread)
    where = "".join(traceback.format_stack(frame, 5)) if frame is not None else ""
    logger.critical("the event loop has been blocked for %.1f s: exiting. It is blocked at: %s", blocked_s, where)
    os._exit(EXIT_STUCK)
