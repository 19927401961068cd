"""The end of a process that cannot go on: in good order if it can, and soon if it cannot."""

import asyncio
import signal
from typing import Any

STUCK_S = 10.0
"""How long a process may take to end in good order while something in it hangs."""
NO_MEMORY_S = 1.0
"""The same where memory is lacking: enough for the leader to hear of the batch. Good order has never been seen to come of it."""


def end_within(seconds: float) -> None:
    """Have the kernel end this process by SIGALRM, unless it has ended by then: nothing that this takes can be lacking here.

    From any thread.
    """
    if not 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def lacks_memory(error: BaseException) -> bool:
    """Whether it says that the host has no memory left for this process. After that any callback may have been lost.

    torch says so in a RuntimeError of its allocator, or passes on what C++ threw. A device that is full is another thing.
    """
    said = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and ("DefaultCPUAllocator: can't allocate memory" in said or "bad_alloc" in said)
    )


def watch(loop: asyncio.AbstractEventLoop) -> None:
    """End soon, too, when a callback of this loop lacks memory: what it was to do is not done, and nobody waits for it with a limit."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and lacks_memory(error):
            end_within(NO_MEMORY_S)
        loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
