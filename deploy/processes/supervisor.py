"""Supervises child processes of one kind, one per slot, and restarts them when they end. Slots can be added and removed."""

import asyncio
import contextlib
import logging
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from multiworld_serving.deploy.processes.child_process import KILL_TIMEOUT_S, ChildProcess, status_text
from multiworld_serving.deploy.processes.fork_server import ForkServer
from multiworld_serving.deploy.processes.notify import NotifyListener

logger = logging.getLogger(__name__)

_POLL_S = 1.0
"""Interval of the check for processes that are blocked."""
_PAUSED_S = 3 * _POLL_S
"""If this check itself is later than this, the silence of other processes counts from now on."""
NOT_STARTED = "not-started"
INVALID_INPUT = 2
"""Exit status of a program whose settings are invalid."""


@dataclass(frozen=True)
class Backoff:
    """Delay before a process is restarted: none at first, then doubling up to a limit."""

    initial_s: float = 0.1
    max_s: float = 5.0
    reset_after_s: float = 10.0
    """After a lifetime of this length the failure count starts again at 1."""

    def delay_s(self, failures: int, jitter: float) -> float:
        """Return the delay after `failures` consecutive failures (at least 1). `jitter`, 0 to 1, reduces it by up to a half."""
        if failures <= 1:
            return 0.0
        # Limit the exponent: after 1024 failures 2.0**n would overflow.
        return min(self.max_s, self.initial_s * 2.0 ** min(failures - 2, 30)) * (1 - jitter / 2)


@dataclass
class ProcessSlot:
    """One supervised process: the running child, if any, its restart history, and the task that restarts it."""

    index: int
    monitor: asyncio.Task[None] | None = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process must end and not be restarted."""
    last_signal: signal.Signals = signal.SIGTERM
    child: ChildProcess | None = None
    failures: int = 0
    """Consecutive failures."""
    restarts: int = 0


class Supervisor:
    """Keeps one process running in each slot inside its `async with` block.

    Leaving the block sends SIGTERM to all processes, and SIGKILL after `stop_timeout_s` (at once if leaving is cancelled).
    Afterwards no process, task or descriptor is left. The same task must enter and leave the block, once.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        count: int,
        *,
        kind: str = "worker",
        environment: Mapping[str, str] | None = None,
        fork_server: ForkServer | None = None,
        backoff: Backoff | None = None,
        stop_timeout_s: float = 10.0,
        fds: Callable[[int], Sequence[int]] = lambda _slot: (),
        notify: NotifyListener | None = None,
        blocked_timeout_s: float = float("inf"),
        on_restart: Callable[[int], None] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            command: returns the argument vector of a slot; called at each start.
            count: number of slots on entering, 0 to `count` - 1.
            kind: kind of process, for log lines.
            environment: of the processes; inherited if None.
            fork_server: forks processes faster than their program starts. Closed on leaving.
            stop_timeout_s: seconds from SIGTERM to SIGKILL.
            fds: returns the descriptors that the process of a slot inherits, with the same numbers.
            notify: receives the signs of life of the processes.
            blocked_timeout_s: seconds without a sign of life after which a process is killed.
            on_restart: called with the slot after each restart.
        """
        self._command = command
        self._kind = kind
        self._environment = os.environ if environment is None else environment
        self._fork_server = fork_server
        self._backoff = backoff or Backoff()
        self._stop_timeout_s = stop_timeout_s
        self._fds = fds
        self._notify = notify
        self._blocked_timeout_s = blocked_timeout_s
        self._on_restart = on_restart or (lambda _slot: None)
        self._slots = {index: ProcessSlot(index) for index in range(count)}
        self.invalid_input = asyncio.Event()
        """Set when a process ended with status 2 at its first start: it refuses its settings and is not restarted."""
        self._stopping = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._watch: asyncio.Task[None] | None = None

    @property
    def pids(self) -> dict[int, int]:
        """Process id by slot, without slots that wait for a restart."""
        return {slot.index: slot.child.pid for slot in self._slots.values() if slot.child}

    @property
    def restarts(self) -> dict[int, int]:
        """Number of restarts by slot."""
        return {slot.index: slot.restarts for slot in self._slots.values()}

    def signal_all(self, signum: signal.Signals) -> None:
        """Send a signal to all running processes."""
        for slot in self._slots.values():
            if slot.child:
                slot.child.send(signum)

    def add(self) -> int:
        """Start a process in a new slot, inside the block. Returns its index, the lowest that is free."""
        index = next(index for index in range(len(self._slots) + 1) if index not in self._slots)
        slot = self._slots[index] = ProcessSlot(index)
        if self._stopping.is_set():
            slot.stopping.set()
        slot.monitor = self._tasks.create_task(self._monitor(slot))
        return index

    async def remove(self, index: int) -> None:
        """End the process of a slot like leaving the block does, and do not restart it. Raises KeyError if there is no such slot."""
        slot = self._slots[index]
        await self._end_slots([slot])
        if slot.monitor is not None and slot.monitor.done() and self._slots.get(index) is slot:
            del self._slots[index]

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for slot in self._slots.values():
            slot.monitor = self._tasks.create_task(self._monitor(slot))
        self._watch = self._tasks.create_task(self._kill_blocked())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._fork_server is not None:
            self._fork_server.close()
        try:
            await self._end_slots(self._slots.values())
        finally:
            for task in (self._watch, *(slot.monitor for slot in self._slots.values())):
                if task is not None:
                    task.cancel()
            try:
                # The exception of the block is not passed to the task group: the caller gets it unchanged, ours as a group.
                await self._tasks.__aexit__(None, None, None)
            finally:
                self._sweep()

    async def _end_slots(self, slots: Collection[ProcessSlot]) -> None:
        """Send SIGTERM to the processes of these slots, and SIGKILL after the stop timeout or when this is cancelled."""
        for slot in slots:
            slot.stopping.set()
        try:
            await self._stop(slots, signal.SIGTERM, self._stop_timeout_s)
        finally:
            await self._stop(slots, signal.SIGKILL, KILL_TIMEOUT_S)

    async def _stop(self, slots: Collection[ProcessSlot], signum: signal.Signals, timeout_s: float) -> None:
        """Send a signal to the running processes of these slots and wait until they have ended."""
        for slot in slots:
            slot.last_signal = signum
            if slot.child:
                level = logging.DEBUG if signum == signal.SIGTERM else logging.WARNING
                logger.log(
                    level, "%s slot=%d pid=%d stopping signal=%s", self._kind, slot.index, slot.child.pid, signum.name
                )
                slot.child.send(signum)
        if running := [slot.monitor for slot in slots if slot.monitor is not None and not slot.monitor.done()]:
            await asyncio.wait(running, timeout=timeout_s)

    def _sweep(self) -> None:
        """Kill and reap children whose monitor task failed."""
        for slot in self._slots.values():
            if slot.child:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    slot.child.reap()
                slot.child = None

    async def _monitor(self, slot: ProcessSlot) -> None:
        if slot.stopping.is_set():
            return
        await self._start(slot)
        while True:
            lived_s, status = await self._end(slot)
            if slot.stopping.is_set():
                # A process that has not installed its signal handlers yet ends by the signal.
                level = logging.DEBUG if status in ("0", "SIGTERM", NOT_STARTED) else logging.WARNING
                logger.log(level, "%s slot=%d stopped status=%s", self._kind, slot.index, status)
                return
            if status == str(INVALID_INPUT) and not slot.restarts:
                logger.error(
                    "%s slot=%d exited with status 2 (invalid settings); see its error above", self._kind, slot.index
                )
                self.invalid_input.set()
                return
            slot.failures = 1 if lived_s >= self._backoff.reset_after_s else slot.failures + 1
            delay_s = self._backoff.delay_s(slot.failures, random.random())
            logger.log(
                logging.INFO if status == "0" and not delay_s else logging.WARNING,  # 0: it was asked to end
                "%s slot=%d ended status=%s lived_s=%.2f restart_in_s=%.2f",
                *(self._kind, slot.index, status, lived_s, delay_s),
            )
            if await _set_within(slot.stopping, delay_s):
                return
            if await self._start(slot):
                slot.restarts += 1
                self._report_restart(slot)

    def _report_restart(self, slot: ProcessSlot) -> None:
        """Call `on_restart`; an exception in it is logged and stops no process."""
        try:
            self._on_restart(slot.index)
        except Exception:
            logger.exception("%s slot=%d on_restart failed", self._kind, slot.index)

    async def _kill_blocked(self) -> None:
        """Kill processes that have stopped sending watchdog notifications."""
        checked_s = resumed_s = time.monotonic()
        while not await _set_within(self._stopping, _POLL_S):
            now_s = time.monotonic()
            if now_s - checked_s > _PAUSED_S:  # the whole machine may have been paused, and its processes with it
                resumed_s = now_s
            checked_s = now_s
            for slot in self._slots.values():
                silent_s = self._notify.silent_s(slot.child.pid) if self._notify and slot.child else 0.0
                silent_s = min(silent_s, now_s - resumed_s)
                if silent_s > self._blocked_timeout_s and slot.child:
                    logger.error(
                        "%s slot=%d pid=%d gave no sign of life for %.1f s: killing it",
                        *(self._kind, slot.index, slot.child.pid, silent_s),
                    )
                    slot.child.send(signal.SIGKILL)

    async def _start(self, slot: ProcessSlot) -> bool:
        command = self._command(slot.index)
        fds = self._fds(slot.index)
        child = await self._fork_server.fork(command, fds) if self._fork_server else None
        try:
            if child is None and not slot.stopping.is_set():
                child = ChildProcess.spawn(command, self._environment, fds)
        except OSError as error:
            logger.error("%s slot=%d cannot be started: %s", self._kind, slot.index, error)  # noqa: TRY400 - the traceback adds nothing
        if child is None:
            return False
        slot.child = child
        logger.info("%s slot=%d pid=%d started", self._kind, slot.index, child.pid)
        if slot.stopping.is_set():  # the signal was sent before the process started
            child.send(slot.last_signal)
        return True

    async def _end(self, slot: ProcessSlot) -> tuple[float, str]:
        """Wait until the process of a slot ends. Returns its lifetime in seconds, and its exit status or signal name."""
        if slot.child is None:
            return 0.0, NOT_STARTED
        await slot.child.ended()
        child, slot.child = slot.child, None
        if self._notify is not None:
            self._notify.forget(child.pid)
        return time.monotonic() - child.started_s, status_text(child.reap())


async def _set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event is set now or within this time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
