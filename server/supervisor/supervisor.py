"""Supervises child processes of one kind, one per slot, and restarts them when they end. Slots can be added and removed."""

import asyncio
import contextlib
import logging
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Self

from multiworld_serving.common.config.process import first_of
from multiworld_serving.server.supervisor.child_process import KILL_TIMEOUT_S, ChildProcess, status_text
from multiworld_serving.server.supervisor.notify import NotifyListener

logger = logging.getLogger(__name__)

_POLL_S = 1.0
"""Interval of the check for processes that are blocked."""
_PAUSED_S = 3 * _POLL_S
"""If this check itself is later than this, the silence of other processes counts from now on."""
_MAX_FAILURES = 5
"""A process is failing if it ends so often in a row."""
NOT_STARTED = "not-started"


@dataclass(frozen=True)
class Backoff:
    """Delay before a process is restarted: none at first, then doubling up to a limit."""

    initial_s: float = 0.1
    max_s: float = 5.0
    reset_after_s: float = 5.0
    """A process that lives longer has not failed. One that does not fork takes 2 s to import torch."""

    def delay_s(self, failures: int, jitter: float) -> float:
        """Return the delay after `failures` consecutive failures (at least 1). `jitter`, 0 to 1, reduces it by up to a half."""
        if failures <= 1:
            return 0.0
        # Limit the exponent: after 1024 failures 2.0**n would overflow.
        return min(self.max_s, self.initial_s * 2.0 ** min(failures - 2, 30)) * (1 - jitter / 2)


@dataclass(eq=False)
class _Slot:
    """One supervised process: the running child, if any, and the number of its restarts."""

    index: int
    added: bool = False
    """Whether it was added while others ran."""
    child: ChildProcess | None = None
    restarts: int = 0
    failures: int = 0
    """How often in a row its process has ended early; see `Backoff.reset_after_s`."""
    error: str = ""
    """The error with which its process has ended last, if it has reported one."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process must end and not be restarted."""
    supervision: asyncio.Task[None] | None = None


@dataclass(eq=False)
class Supervisor:
    """Keeps one process running in each slot inside its `async with` block.

    Leaving the block sends SIGTERM to all processes, and SIGKILL after `stop_timeout_s` (at once if leaving is cancelled).
    Afterwards no process, task or descriptor is left. The same task must enter and leave the block, once.

    Attributes:
        start: starts the process of a slot. Raises OSError.
        count: number of slots on entering, 0 to `count` - 1.
        notify: receives the signs of life of the processes.
        kind: kind of process, for log lines.
        stop_timeout_s: seconds from SIGTERM to SIGKILL.
        blocked_timeout_s: seconds without a sign of life after which a process is killed.
        on_restart: called after each restart, and when `failing` has changed.
        cannot_start: set when one of the first processes reports at its first start that it cannot start with its settings, or when all
            processes are failing and none has ever lived longer than `Backoff.reset_after_s`.
        error: why, if `cannot_start` is set.
    """

    start: Callable[[int], ChildProcess]
    count: int
    notify: NotifyListener
    kind: str = "worker"
    backoff: Backoff = Backoff()
    stop_timeout_s: float = 10.0
    blocked_timeout_s: float = float("inf")
    on_restart: Callable[[], object] = lambda: None
    cannot_start: asyncio.Event = field(default_factory=asyncio.Event)
    error: str = ""

    def __post_init__(self) -> None:
        self._slots = {index: _Slot(index) for index in range(self.count)}
        self._tasks = asyncio.TaskGroup()
        self._has_lived = False

    @property
    def pids(self) -> dict[int, int]:
        """Process id by slot, without slots that wait for a restart."""
        return {slot.index: slot.child.pid for slot in self._slots.values() if slot.child}

    @property
    def is_ready(self) -> bool:
        """Whether all processes have said that they serve."""
        return len(self.pids) == self.count and all(map(self.notify.is_ready, self.pids.values()))

    @property
    def restarts(self) -> dict[int, int]:
        """Number of restarts by slot."""
        return {slot.index: slot.restarts for slot in self._slots.values()}

    @property
    def failing(self) -> list[str]:
        """One text for each slot whose process ends at once again and again."""
        return [self._failure(slot) for slot in self._slots.values() if slot.failures >= _MAX_FAILURES]

    def signal_all(self, signum: signal.Signals) -> None:
        """Send a signal to all running processes."""
        for slot in self._slots.values():
            if slot.child:
                slot.child.send(signum)

    def add(self) -> int:
        """Start a process in a new slot, inside the block. Returns its index, the lowest that is free."""
        index = next(index for index in range(len(self._slots) + 1) if index not in self._slots)
        self._slots[index] = _Slot(index, added=True)
        self._supervise(self._slots[index])
        return index

    async def remove(self, index: int) -> None:
        """End the process of a slot like leaving the block does, and do not restart it. Raises KeyError if there is no such slot."""
        slot = self._slots[index]
        slot.stopping.set()
        assert slot.supervision is not None, "it was added inside the block"
        await asyncio.wait({slot.supervision})
        if self._slots.get(index) is slot:
            del self._slots[index]

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        for slot in self._slots.values():
            self._supervise(slot)
        return self

    async def __aexit__(self, *_: object) -> None:
        for slot in self._slots.values():
            slot.stopping.set()
        # The exception of the block is not passed to the task group: the caller gets it unchanged, ours as a group.
        await self._tasks.__aexit__(None, None, None)

    def _supervise(self, slot: _Slot) -> None:
        slot.supervision = self._tasks.create_task(self._run(slot))

    async def _run(self, slot: _Slot) -> None:
        """Keep a process running in a slot until it must stop."""
        starts = 0
        while not slot.stopping.is_set():
            child = slot.child = self._start(slot)
            refused, recovery = "", asyncio.get_running_loop().call_later(self.backoff.reset_after_s, self._lives, slot)
            if child is None:
                lived_s, status = 0.0, NOT_STARTED
            else:
                starts += 1
                if starts > 1:
                    slot.restarts += 1
                    self.on_restart()
                status, refused = await self._end(slot, child)
                lived_s = time.monotonic() - child.started_s
            recovery.cancel()
            if slot.stopping.is_set():
                # A process that has not installed its signal handlers yet ends by the signal.
                level = logging.DEBUG if status in ("0", "SIGTERM", NOT_STARTED) else logging.WARNING
                logger.log(level, "%s slot=%d stopped status=%s", self.kind, slot.index, status)
                return
            if refused and not slot.restarts and not slot.added:
                logger.error("%s slot=%d refused its settings: %s", self.kind, slot.index, refused)
                self.error = refused
                self.cannot_start.set()
                return
            slot.failures += 1
            if slot.failures == _MAX_FAILURES:
                logger.error("%s", self._failure(slot))
                if len(self.failing) == len(self._slots) and not self._has_lived:
                    self.error = self._failure(slot)
                    self.cannot_start.set()
            delay_s = self.backoff.delay_s(slot.failures, random.random())
            logger.log(
                logging.INFO if status == "0" and not delay_s else logging.WARNING,  # 0: it was asked to end
                "%s slot=%d ended status=%s lived_s=%.2f restart_in_s=%.2f",
                *(self.kind, slot.index, status, lived_s, delay_s),
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await slot.stopping.wait()

    def _failure(self, slot: _Slot) -> str:
        why = slot.error or "it reported no error; see the log"
        early = f"{_MAX_FAILURES} times in a row within {self.backoff.reset_after_s:g} s of its start"
        return f"{self.kind} slot={slot.index} ended {early}: {why}"

    def _lives(self, slot: _Slot) -> None:
        """Called when the process of this slot has not ended early."""
        self._has_lived = True
        was_failing, slot.failures = slot.failures >= _MAX_FAILURES, 0
        if was_failing:
            self.on_restart()

    def _start(self, slot: _Slot) -> ChildProcess | None:
        try:
            child = self.start(slot.index)
        except OSError as error:
            slot.error = str(error)
            logger.error("%s slot=%d cannot be started: %s", self.kind, slot.index, error)  # noqa: TRY400 - the traceback adds nothing
            return None
        logger.info("%s slot=%d pid=%d started", self.kind, slot.index, child.pid)
        return child

    async def _end(self, slot: _Slot, child: ChildProcess) -> tuple[str, str]:
        """Wait until a process ends, is blocked, or must stop, and end it.

        Returns:
            Its exit status or signal name, and why it cannot start with its settings, if it has said so.
        """
        kill_timeout_s = KILL_TIMEOUT_S
        ended = asyncio.create_task(child.ended())
        waits: list[Awaitable[object]] = [asyncio.shield(ended), slot.stopping.wait(), self._blocked(slot, child.pid)]
        try:
            await first_of(*waits)
            child.send(signal.SIGTERM if slot.stopping.is_set() else signal.SIGKILL)
            await asyncio.wait({ended}, timeout=self.stop_timeout_s)
            child.kill()
            await asyncio.wait({ended}, timeout=KILL_TIMEOUT_S)
            kill_timeout_s = 0.0
        finally:
            ended.cancel()
            refused, error = self.notify.forget(child.pid)
            slot.error = refused or error
            slot.child = None
            status = status_text(child.reap(kill_timeout_s))
        return status, refused

    async def _blocked(self, slot: _Slot, pid: int) -> None:
        """Wait until a process has sent nothing for too long. The time of a pause of the whole machine does not count."""
        resumed_s = checked_s = time.monotonic()
        silent_s = 0.0
        while silent_s <= self.blocked_timeout_s:
            await asyncio.sleep(_POLL_S)
            now_s = time.monotonic()
            if now_s - checked_s > _PAUSED_S:
                resumed_s = now_s
            checked_s = now_s
            silent_s = min(self.notify.silent_s(pid), now_s - resumed_s)
        facts = self.kind, slot.index, pid, silent_s
        logger.error("%s slot=%d pid=%d gave no sign of life for %.1f s: killing it", *facts)


class ProcessSet:
    """Supervisors whose processes start together and stop together.

    Attributes:
        supervisors: by role, in the order in which they start. They stop in the reverse order.
    """

    def __init__(self, supervisors: dict[str, Supervisor]) -> None:
        self.supervisors = supervisors
        self._stopping = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def others(self) -> Iterable[AbstractAsyncContextManager[object]]:
        """What else runs beside the processes."""
        return ()

    def start(self, tasks: asyncio.TaskGroup, resources: contextlib.ExitStack | None = None) -> None:
        """Start the processes. `resources` are closed when they have ended."""
        self._running = tasks.create_task(self._run(resources or contextlib.ExitStack()))

    async def stop(self) -> None:
        """Stop the processes in order. Returns when they have ended."""
        self._stopping.set()
        if self._running is not None:
            await asyncio.wait({self._running})

    async def cannot_start(self) -> str:
        """Wait until a supervisor finds that its processes cannot start. Returns why."""
        await first_of(*(each.cannot_start.wait() for each in self.supervisors.values()))
        return next(each.error for each in self.supervisors.values() if each.cannot_start.is_set())

    async def _run(self, resources: contextlib.ExitStack) -> None:
        with resources:
            async with contextlib.AsyncExitStack() as running:
                for each in (*self.supervisors.values(), *self.others()):
                    await running.enter_async_context(each)
                await self._stopping.wait()


def restart_metrics(restarts: Iterable[tuple[str, str, Mapping[int, int]]]) -> str:
    """The restarts of each model, role and slot in Prometheus' text format, which `merge_metrics` orders. Frontends have the model ""."""
    text = ""
    for model, role, of_slots in restarts:
        name, label = f"multiworld_{role}_restarts_total", f'model="{model}",' if model else ""
        text += f"# HELP {name} Restarts of {role}s by the supervisor.\n# TYPE {name} counter\n"
        text += "".join(f'{name}{{{label}slot="{slot}"}} {count}\n' for slot, count in of_slots.items())
    return text
