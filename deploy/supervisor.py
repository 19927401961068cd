"""The local supervisor: processes of one kind on this machine, each in its slot, started again whenever they end."""

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

from deploy.child import KILL_TIMEOUT_S, Child, status_text
from deploy.fork_server import ForkServer

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Pause between two looks for workers that live and do not come."""


@dataclass(frozen=True)
class Backoff:
    """How long to wait before a worker is started again: not at all the first time, then doubling up to a limit."""

    initial_s: float = 0.1
    max_s: float = 5.0
    reset_after_s: float = 10.0
    """A worker that lived this long was sound: its end is the first failure of a new count."""

    def delay_s(self, failures: int, jitter: float) -> float:
        """Seconds to wait after `failures` ends in a row, 1 or more; `jitter`, 0 to 1, takes off up to a half."""
        if failures <= 1:
            return 0.0
        # The exponent is bounded: a worker may fail for weeks, and 2.0**1024 overflows.
        return min(self.max_s, self.initial_s * 2.0 ** min(failures - 2, 30)) * (1 - jitter / 2)


@dataclass
class Slot:
    """One place for a worker, and how it went there so far."""

    index: int
    child: Child | None = None
    failures: int = 0
    """Ends in a row without a sound life between them."""
    restarts: int = 0
    absent_since_s: float | None = None
    """Since when it has not been seen with the leader; None while it is."""


class Supervisor:
    """Keeps one process running in each of `count` slots while its `async with` block lasts.

    Leaving the block sends SIGTERM to all, and SIGKILL after `stop_timeout_s` (at once if the leaving itself is
    cancelled); no process, task or descriptor stays behind. One task must enter and leave it, once.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        count: int,
        *,
        kind: str = "worker",
        name: Callable[[int], str] | None = None,
        environment: Mapping[str, str] | None = None,
        forks: ForkServer | None = None,
        backoff: Backoff | None = None,
        stop_timeout_s: float = 10.0,
        absent_timeout_s: float = float("inf"),
        on_restart: Callable[[int], None] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            command: gives the argument vector for a slot, 0 to `count` - 1; called at each start.
            kind: of process, for the log.
            name: by which a slot's process comes to the leader; that of a worker if None.
            environment: of the processes; this process's own if None.
            forks: where processes are to be had in less time than it takes to start their program. Closed on leaving.
            stop_timeout_s: time from SIGTERM to SIGKILL.
            absent_timeout_s: a process that lives so long without being `present` is killed: it is of no use.
            on_restart: called with the slot each time that its process was started again.
        """
        self._command = command
        self._kind = kind
        self._name = name or worker_name
        self._environment = os.environ if environment is None else environment
        self._forks = forks
        self._backoff = backoff or Backoff()
        self._stop_timeout_s = stop_timeout_s
        self._absent_timeout_s = absent_timeout_s
        self._on_restart = on_restart or (lambda _slot: None)
        self._slots = [Slot(index) for index in range(count)]
        self._stopping = asyncio.Event()
        self._last_signal = signal.SIGTERM
        self._tasks = asyncio.TaskGroup()
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def pids(self) -> dict[int, int]:
        """Process id by slot; a slot that waits for its next start is not in it."""
        return {slot.index: slot.child.pid for slot in self._slots if slot.child}

    @property
    def restarts(self) -> dict[int, int]:
        """How many times each slot's process was started again."""
        return {slot.index: slot.restarts for slot in self._slots}

    def proven(self, name: str) -> None:
        """The process of this name serves: when it ends, it is started again at once. Names that are not ours are ignored."""
        for slot in self._slots:
            if name == self._name(slot.index):
                slot.failures = 0

    def end(self, name: str) -> None:
        """SIGKILL the process of this name, if it runs: it is of no use."""
        for slot in self._slots:
            if name == self._name(slot.index) and slot.child:
                slot.child.send(signal.SIGKILL)

    def present(self, names: Collection[str]) -> None:
        """The processes of these names are with the leader, serving or on their way to it, and no others."""
        for slot in self._slots:
            if self._name(slot.index) in names:
                slot.absent_since_s = None
            elif slot.absent_since_s is None:
                slot.absent_since_s = time.monotonic()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._keepers = [self._tasks.create_task(self._keep(slot)) for slot in self._slots]
        self._keepers.append(self._tasks.create_task(self._kill_absent()))
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._forks is not None:
            self._forks.close()
        try:
            await self._stop(signal.SIGTERM, self._stop_timeout_s)
        finally:
            await self._stop(signal.SIGKILL, KILL_TIMEOUT_S)
            for keeper in self._keepers:
                keeper.cancel()
            try:
                # The block's error is not passed on: it is the caller's to handle, while ours come as a group.
                await self._tasks.__aexit__(None, None, None)
            finally:
                self._sweep()

    async def _stop(self, signum: signal.Signals, timeout_s: float) -> None:
        """Send a signal to all processes that run, and wait for their end."""
        self._last_signal = signum
        for slot in self._slots:
            if slot.child:
                logger.info("%s slot=%d pid=%d stopping signal=%s", self._kind, slot.index, slot.child.pid, signum.name)
                slot.child.send(signum)
        if running := [keeper for keeper in self._keepers if not keeper.done()]:
            await asyncio.wait(running, timeout=timeout_s)

    def _sweep(self) -> None:
        """Kill and reap what lost its keeper, because a keeper failed."""
        for slot in self._slots:
            if slot.child:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    slot.child.reap()
                slot.child = None

    async def _keep(self, slot: Slot) -> None:
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
                self._on_restart(slot.index)

    async def _kill_absent(self) -> None:
        """A worker may live and never come back, its threads stuck where no error shows. A new process can do better."""
        while not await self._stopped_within(_LOOK_S):
            for slot in self._slots:
                if slot.child is None or slot.absent_since_s is None:
                    continue
                absent_s = time.monotonic() - max(slot.absent_since_s, slot.child.started_s)
                if absent_s > self._absent_timeout_s:
                    logger.error(
                        "%s slot=%d pid=%d has not come to the leader for %.0f s: killing it",
                        *(self._kind, slot.index, slot.child.pid, absent_s),
                    )
                    slot.child.send(signal.SIGKILL)
                    slot.absent_since_s = time.monotonic()

    async def _start(self, slot: Slot) -> bool:
        command = self._command(slot.index)
        slot.absent_since_s = time.monotonic()
        # Forked, it may have joined before we know of it.
        child = await self._forks.fork(command) if self._forks else None
        try:
            if child is None and not self._stopping.is_set():
                child = Child.spawn(command, self._environment)
        except OSError as error:
            logger.error("%s slot=%d cannot be started: %s", self._kind, slot.index, error)  # noqa: TRY400  says it all
        if child is None:
            return False
        slot.child = child
        logger.info("%s slot=%d pid=%d started", self._kind, slot.index, child.pid)
        if self._stopping.is_set():  # the others were told when this one was not there yet
            child.send(self._last_signal)
        return True

    async def _end(self, slot: Slot) -> tuple[float, str]:
        """Wait for the end of a slot's process: how long it lived, and its exit status or the name of its signal."""
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
    """The name by which the local worker of this slot joins."""
    return f"local-{slot}"
