"""Supervises child processes of one kind, one per slot, and restarts them when they end."""

import asyncio
import contextlib
import logging
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from multiworld_serving.deploy.processes.child_process import KILL_TIMEOUT_S, ChildProcess, status_text
from multiworld_serving.deploy.processes.fork_server import ForkServer

logger = logging.getLogger(__name__)

_POLL_S = 1.0
"""Interval of the check for processes that run but are not connected to the leader."""


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
    """One supervised process: the running child, if any, and its restart history."""

    index: int
    child: ChildProcess | None = None
    failures: int = 0
    """Consecutive failures."""
    restarts: int = 0
    absent_since_s: float | None = None
    """Since when the process is not connected to the leader; None while it is."""


class Supervisor:
    """Keeps one process running in each of `count` slots inside its `async with` block.

    Leaving the block sends SIGTERM to all processes, and SIGKILL after `stop_timeout_s` (at once if leaving is cancelled).
    Afterwards no process, task or descriptor is left. The same task must enter and leave the block, once.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        count: int,
        *,
        kind: str = "worker",
        name: Callable[[int], str] | None = None,
        environment: Mapping[str, str] | None = None,
        fork_server: ForkServer | None = None,
        backoff: Backoff | None = None,
        stop_timeout_s: float = 10.0,
        absent_timeout_s: float = float("inf"),
        on_restart: Callable[[int], None] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            command: returns the argument vector of a slot, 0 to `count` - 1; called at each start.
            kind: kind of process, for log lines.
            name: returns the name with which the process of a slot connects to the leader; `worker_name` if None.
            environment: of the processes; inherited if None.
            fork_server: forks processes faster than their program starts. Closed on leaving.
            stop_timeout_s: seconds from SIGTERM to SIGKILL.
            absent_timeout_s: seconds after which a process that is not connected to the leader (see `present`) is killed.
            on_restart: called with the slot after each restart.
        """
        self._command = command
        self._kind = kind
        self._name = name or worker_name
        self._environment = os.environ if environment is None else environment
        self._fork_server = fork_server
        self._backoff = backoff or Backoff()
        self._stop_timeout_s = stop_timeout_s
        self._absent_timeout_s = absent_timeout_s
        self._on_restart = on_restart or (lambda _slot: None)
        self._slots = [ProcessSlot(index) for index in range(count)]
        self._stopping = asyncio.Event()
        self._last_signal = signal.SIGTERM
        self._tasks = asyncio.TaskGroup()
        self._monitors: list[asyncio.Task[None]] = []

    @property
    def pids(self) -> dict[int, int]:
        """Process id by slot, without slots that wait for a restart."""
        return {slot.index: slot.child.pid for slot in self._slots if slot.child}

    @property
    def restarts(self) -> dict[int, int]:
        """Number of restarts by slot."""
        return {slot.index: slot.restarts for slot in self._slots}

    def proven(self, name: str) -> None:
        """Reset the failure count of the process of this name, because it serves. Unknown names are ignored."""
        for slot in self._slots:
            if name == self._name(slot.index):
                slot.failures = 0

    def end(self, name: str) -> None:
        """Send SIGKILL to the process of this name, if it runs."""
        for slot in self._slots:
            if name == self._name(slot.index) and slot.child:
                slot.child.send(signal.SIGKILL)

    def present(self, names: Collection[str]) -> None:
        """Set the names of the processes that are connected to the leader; all others are absent."""
        for slot in self._slots:
            if self._name(slot.index) in names:
                slot.absent_since_s = None
            elif slot.absent_since_s is None:
                slot.absent_since_s = time.monotonic()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._monitors = [self._tasks.create_task(self._monitor(slot)) for slot in self._slots]
        self._monitors.append(self._tasks.create_task(self._kill_absent()))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._fork_server is not None:
            self._fork_server.close()
        try:
            await self._stop(signal.SIGTERM, self._stop_timeout_s)
        finally:
            await self._stop(signal.SIGKILL, KILL_TIMEOUT_S)
            for monitor in self._monitors:
                monitor.cancel()
            try:
                # The exception of the block is not passed to the task group: the caller gets it unchanged, ours as a group.
                await self._tasks.__aexit__(None, None, None)
            finally:
                self._sweep()

    async def _stop(self, signum: signal.Signals, timeout_s: float) -> None:
        """Send a signal to all running processes and wait until they have ended."""
        self._last_signal = signum
        for slot in self._slots:
            if slot.child:
                logger.info("%s slot=%d pid=%d stopping signal=%s", self._kind, slot.index, slot.child.pid, signum.name)
                slot.child.send(signum)
        if running := [monitor for monitor in self._monitors if not monitor.done()]:
            await asyncio.wait(running, timeout=timeout_s)

    def _sweep(self) -> None:
        """Kill and reap children whose monitor task failed."""
        for slot in self._slots:
            if slot.child:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    slot.child.reap()
                slot.child = None

    async def _monitor(self, slot: ProcessSlot) -> None:
        if self._stopping.is_set():
            return
        await self._start(slot)
        while True:
            lived_s, status = await self._end(slot)
            if self._stopping.is_set():
                logger.info("%s slot=%d stopped status=%s", self._kind, slot.index, status)
                return
            slot.failures = 1 if lived_s >= self._backoff.reset_after_s else slot.failures + 1
            delay_s = self._backoff.delay_s(slot.failures, random.random())
            logger.warning(
                "%s slot=%d ended status=%s lived_s=%.2f restart_in_s=%.2f",
                *(self._kind, slot.index, status, lived_s, delay_s),
            )
            if await self._stopped_within(delay_s):
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

    async def _kill_absent(self) -> None:
        """Kill processes that run but do not connect to the leader, for example because a thread is stuck."""
        while not await self._stopped_within(_POLL_S):
            for slot in self._slots:
                if slot.child is None or slot.absent_since_s is None:
                    continue
                absent_s = time.monotonic() - max(slot.absent_since_s, slot.child.started_s)
                if absent_s > self._absent_timeout_s:
                    logger.error(
                        "%s slot=%d pid=%d not connected to the leader for %.0f s: killing it",
                        *(self._kind, slot.index, slot.child.pid, absent_s),
                    )
                    slot.child.send(signal.SIGKILL)
                    slot.absent_since_s = time.monotonic()

    async def _start(self, slot: ProcessSlot) -> bool:
        command = self._command(slot.index)
        slot.absent_since_s = time.monotonic()
        # A forked process may join before fork() returns.
        child = await self._fork_server.fork(command) if self._fork_server else None
        try:
            if child is None and not self._stopping.is_set():
                child = ChildProcess.spawn(command, self._environment)
        except OSError as error:
            logger.error("%s slot=%d cannot be started: %s", self._kind, slot.index, error)  # noqa: TRY400 - the traceback adds nothing
        if child is None:
            return False
        slot.child = child
        logger.info("%s slot=%d pid=%d started", self._kind, slot.index, child.pid)
        if self._stopping.is_set():  # the other processes were signalled before this one started
            child.send(self._last_signal)
        return True

    async def _end(self, slot: ProcessSlot) -> tuple[float, str]:
        """Wait until the process of a slot ends. Returns its lifetime in seconds, and its exit status or signal name."""
        if slot.child is None:
            return 0.0, "not-started"
        await slot.child.ended()
        child, slot.child = slot.child, None
        return time.monotonic() - child.started_s, status_text(child.reap())

    async def _stopped_within(self, delay_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        return self._stopping.is_set()


def worker_name(slot: int) -> str:
    """Return the name with which the local worker of this slot joins."""
    return f"local-{slot}"
