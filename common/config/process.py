"""The process and its operating system: limits set at start-up, the available memory, and notifications of systemd."""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""See mallopt(3)."""
_KEPT_BYTES, _OLD_LIMIT_BYTES = 1 << 30, 1 << 25
"""The second one is the largest mmap threshold that older versions of glibc accept."""
_FROZEN_OBJECTS = 50_000
"""The garbage collector has fewer objects after `gc.freeze`, and more before it."""
STATUS_FIELD = "STATUS="
"""Begins a message with the error of a program that cannot start with its settings; see sd_notify(3)."""
ERROR_FIELD = "X_ERROR="
"""Begins a message with the unexpected error that ends a program."""
SEND_TIMEOUT_S = 1.0
"""For messages that are sent once. Linux queues 10 for a receiver, and a supervisor that starts many processes reads none meanwhile."""
_READY_POLL_S = 0.1
SAME_STOP_S = 0.5
"""Signals to stop within this time of the first one are one request: timeout(1) signals a process and then its process group."""


def prepare_inherited() -> None:
    """Replace what a parent process may have left in an unusable state. Call it first of all.

    Opens /dev/null for standard streams that are closed, so that no socket gets their descriptors, and has the kernel keep the exit
    statuses of child processes.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout, sys.stderr = sys.stdout or open(1, "w"), sys.stderr or open(2, "w")  # noqa: SIM115
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit.

    Each connection of a client and each link needs a descriptor. A shell's default of 1,024 is too low.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def prctl(option: int, value: int) -> None:
    """See prctl(2). Raises OSError."""
    call = ctypes.CDLL(None, use_errno=True).prctl
    call.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    if call(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def exit_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even if this process is stopped. Call it at start-up.

    Standard input must be a pipe that the parent holds open. Raises SystemExit if the parent has ended already.
    """
    try:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except OSError as error:
        logger.warning("this system cannot end this process with its parent: %s", error)
    standard_input = select.poll()
    standard_input.register(0, 0)  # POLLHUP is always reported
    if any(event & select.POLLHUP for _, event in standard_input.poll(0)):
        raise SystemExit(0)


def on_stop_signal(stop: Callable[[], object]) -> None:
    """Call `stop` at the first SIGTERM or SIGINT that this process receives from now on. Call it inside the event loop.

    A later signal ends the process at once, unless it arrives within SAME_STOP_S of the first one.
    """
    loop = asyncio.get_running_loop()
    first_s: float | None = None

    def receive(signum: signal.Signals) -> None:
        nonlocal first_s
        if first_s is None:
            first_s = loop.time()
            stop()
        elif loop.time() - first_s >= SAME_STOP_S:
            loop.remove_signal_handler(signum)
            signal.raise_signal(signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, receive, signum)


async def first_of(*waits: Awaitable[T]) -> T:
    """The result of the first of them that has ended. The others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task.result() for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()


def check_memory(needed_bytes: int) -> None:
    """Raise MemoryError if `needed_bytes` are not available, so that one job fails instead of the OOM killer ending the process.

    This checks and does not reserve: other processes may allocate afterwards. Does nothing if the available memory is unknown.
    """
    available_bytes = []
    for find in (_in_container, _on_machine):
        with contextlib.suppress(OSError, KeyError, ValueError):
            available_bytes.append(find())
    if available_bytes and needed_bytes > (least := min(available_bytes)):
        raise MemoryError(f"needs {needed_bytes / 1e6:.0f} MB, but only {least / 1e6:.0f} MB are available")


def release_free_memory() -> None:
    """Return freed memory to the operating system. Call it after models were loaded or dropped. Takes about 1 ms.

    glibc keeps freed memory for later allocations: a worker that had loaded a stage of 45 MB 40 times kept 200 MB. Reference cycles are
    collected only after `gc.freeze`; otherwise the garbage collector would scan all modules for 0.2 s. `gc.get_freeze_count` is not asked,
    because it visits all frozen objects, which takes 30 to 70 ms.
    """
    if len(gc.get_objects()) < _FROZEN_OBJECTS:
        gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc
        trim(0)


def keep_free_memory() -> None:
    """Keep freed memory for later allocations until `release_free_memory`, instead of returning large blocks to the operating system.

    Mapping memory for the activations of each batch took 2.7 % of the CPU time of a worker with ResNet-50.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # glibc
        mallopt(_M_ARENA_MAX, 1)  # further arenas, of other threads, ignore the thresholds
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        if not mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES):
            mallopt(_M_MMAP_THRESHOLD, _OLD_LIMIT_BYTES)


def _on_machine() -> int:
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _in_container() -> int:
    """Memory left in the control group. Inactive page cache counts as available, because the kernel reclaims it. ValueError: no limit."""
    limit = int((_CGROUP / "memory.max").read_text())  # or "max"
    used = int((_CGROUP / "memory.current").read_text())
    statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    return limit - used + int(statistics["inactive_file"])


@contextlib.asynccontextmanager
async def notify_systemd(is_ready: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
    """Send READY=1 in the block as soon as this process `is_ready`, and STOPPING=1 at its end, see sd_notify(3).

    With WatchdogSec=, the event loop sends WATCHDOG=1 twice in that time, so systemd restarts a process whose loop is blocked. Does nothing
    without systemd.
    """
    given = os.environ.get("WATCHDOG_USEC", "")
    interval_s = int(given) / 2e6 if given.isdecimal() else 0.0
    if is_ready() or interval_s:
        notify("READY=1" if is_ready() else "WATCHDOG=1", SEND_TIMEOUT_S)
    sending = [asyncio.create_task(_send_heartbeats(interval_s))] if interval_s else []
    if not is_ready():
        sending.append(asyncio.create_task(_send_ready(is_ready)))
    try:
        yield
    finally:
        for each in sending:
            each.cancel()
        notify("STOPPING=1")


def notify(state: str, timeout_s: float = 0.0) -> bool:
    """Send a message to systemd or the supervisor, see sd_notify(3). Returns whether there is one, and the message was sent.

    Args:
        timeout_s: longest time to block while the queue of the receiver is full.
    """
    own_pid = str(os.getpid())
    is_own = os.environ.get("WATCHDOG_PID", own_pid) == own_pid  # otherwise it is set for the parent process
    if not is_own or not (address := os.environ.get("NOTIFY_SOCKET")):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect("\0" + address[1:] if address.startswith("@") else address)  # otherwise it would not wait
            sock.send(state.encode())
        except OSError as error:
            receiver = "the supervisor" if address.startswith("@") else "systemd"
            logger.warning("cannot notify %s of %s at %s: %s", receiver, state, address, error)
            return False
    return True


async def _send_ready(is_ready: Callable[[], bool]) -> None:
    while not is_ready():  # noqa: ASYNC110 - a few times a second, and only at the start
        await asyncio.sleep(_READY_POLL_S)
    notify("READY=1", SEND_TIMEOUT_S)


async def _send_heartbeats(interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        notify("WATCHDOG=1")
