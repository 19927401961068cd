"""Ends a process that cannot continue: an orderly exit with a deadline, enforced by the kernel."""

import asyncio
import signal
from typing import Any

EXIT_STUCK = 70
"""Exit status of a process that cannot continue."""
EXIT_DEVICE_FAILED = 71
"""Exit status of a process whose GPU has failed: only a new process can use the GPU again, if any can."""
GRACEFUL_EXIT_S = 10.0
"""Deadline for an orderly exit while something in the process hangs."""
OUT_OF_MEMORY_EXIT_S = 1.0
"""Deadline after running out of memory: enough to tell the leader about the batch. An orderly exit has never succeeded in this state."""


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


def handle_loop_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Arm the exit timer when a callback of this loop runs out of memory: its work is lost, and its waiters have no timeout."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and is_out_of_memory(error):
            arm_exit_timer(OUT_OF_MEMORY_EXIT_S)
        loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
