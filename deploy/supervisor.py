"""The local supervisor: worker processes on this machine, each in its slot, started again whenever they end.

A worker's standard input is a pipe whose other end this process holds: when this process is gone, even by SIGKILL, the
worker reads end-of-file and exits (`--exit-with-parent`). Each worker leads a session of its own, so that Ctrl-C in a
terminal reaches the leader alone, which drains before it stops the workers.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from config.settings import ENV_PREFIX
from config.sources import option
from server.settings import ServeSettings
from workers.device import spread

logger = logging.getLogger(__name__)

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
KILL_TIMEOUT_S = 5.0
"""Longest wait for the end of a process after SIGKILL; one that takes longer hangs inside the kernel."""


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


class Child:
    """One process in a session of its own. Only `reap` collects its status: until then, no other can get its number."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it. Raises OSError if that fails."""
        read_fd, self._write_fd = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603  the command is the caller's own
                command, stdin=read_fd, env=environment, start_new_session=True
            )
        except OSError:
            os.close(self._write_fd)
            raise
        finally:
            os.close(read_fd)
        self.pid = self._process.pid
        self.started_s = time.monotonic()

    def tell(self, line: str) -> bool:
        """Write one line to its standard input; False when it has ended."""
        try:
            return os.write(self._write_fd, line.encode() + b"\n") > len(line.encode())
        except OSError:
            return False

    def send(self, signum: int) -> None:
        """Signal the process, not what it started. To be called before `reap` only."""
        os.kill(self.pid, signum)

    async def ended(self) -> None:
        """Wait until it has ended. Cancelling is safe."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(self.pid)
        loop.add_reader(pidfd, event.set)
        try:
            await event.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)

    def reap(self) -> int:
        """SIGKILL its process group, so that nothing it started stays behind, and collect its status.

        Returns the exit status, or minus the number of the signal that ended it.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self._write_fd)
        return self._process.wait(KILL_TIMEOUT_S)


class Reserve:
    """One process that has imported everything and waits to be told, on its standard input, which command line to run.

    Importing torch takes seconds; a worker that is started from the reserve has them behind it.
    """

    def __init__(self, command: Sequence[str] | None, environment: Mapping[str, str]) -> None:
        """Start nothing yet. Without a `command` there never is a reserve."""
        self._command = command
        self._environment = environment
        self._child: Child | None = None

    def fill(self) -> None:
        """Start one if there is none."""
        if self._command is not None and self._child is None:
            with contextlib.suppress(OSError):  # then the next worker takes longer to start, that is all
                self._child = Child(self._command, self._environment)

    def take(self, command: Sequence[str]) -> Child | None:
        """The process, now running `command`; None if there is none that lives."""
        child, self._child = self._child, None
        if child is None:
            return None
        if child.tell(json.dumps(list(command))):
            child.started_s = time.monotonic()
            return child
        child.reap()
        return None

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.reap()
            self._child = None


@dataclass
class Slot:
    """One place for a worker, and how it went there so far."""

    index: int
    child: Child | None = None
    failures: int = 0
    """Ends in a row without a sound life between them."""
    restarts: int = 0
    proven: bool = False
    """Whether the process that runs now has shown that it serves."""


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
        environment: Mapping[str, str] | None = None,
        reserve: Sequence[str] | None = None,
        backoff: Backoff | None = None,
        stop_timeout_s: float = 10.0,
        on_restart: Callable[[int], None] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            command: gives the argument vector for a slot, 0 to `count` - 1; called at each start.
            environment: of the processes; this process's own if None.
            reserve: command of a process that reads another command line, as a JSON list, from its standard input and
                goes on as that; one is held ready for the next restart, from when all slots are proven.
            stop_timeout_s: time from SIGTERM to SIGKILL.
            on_restart: called with the slot each time that its process was started again.
        """
        self._command = command
        self._environment = os.environ if environment is None else environment
        self._reserve = Reserve(reserve, self._environment)
        self._backoff = backoff or Backoff()
        self._stop_timeout_s = stop_timeout_s
        self._on_restart = on_restart or (lambda _slot: None)
        self._slots = [Slot(index) for index in range(count)]
        self._stopping = asyncio.Event()
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
            if name == worker_name(slot.index):
                slot.failures, slot.proven = 0, True
        if all(slot.proven for slot in self._slots) and not self._stopping.is_set():
            self._reserve.fill()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._keepers = [self._tasks.create_task(self._keep(slot)) for slot in self._slots]
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._reserve.close()
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
        for slot in self._slots:
            if slot.child:
                logger.info("worker slot=%d pid=%d stopping signal=%s", slot.index, slot.child.pid, signum.name)
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
        self._start(slot)
        while True:
            lived_s, status = await self._end(slot)
            if self._stopping.is_set():
                logger.info("worker slot=%d stopped status=%s", slot.index, status)
                return
            slot.failures = 1 if lived_s >= self._backoff.reset_after_s else slot.failures + 1
            delay_s = self._backoff.delay_s(slot.failures, random.random())
            logger.warning(
                "worker slot=%d ended status=%s lived_s=%.2f restart_in_s=%.2f", slot.index, status, lived_s, delay_s
            )
            if await self._stopped_within(delay_s):
                return
            if self._start(slot):
                slot.restarts += 1
                self._on_restart(slot.index)

    def _start(self, slot: Slot) -> bool:
        try:
            command = self._command(slot.index)
            slot.child = self._reserve.take(command) or Child(command, self._environment)
        except OSError as error:
            logger.error("worker slot=%d cannot be started: %s", slot.index, error)  # noqa: TRY400  says it all
            return False
        logger.info("worker slot=%d pid=%d started", slot.index, slot.child.pid)
        return True

    async def _end(self, slot: Slot) -> tuple[float, str]:
        """Wait for the end of a slot's process: how long it lived, and its exit status or the name of its signal."""
        if slot.child is None:
            return 0.0, "not-started"
        await slot.child.ended()
        child, slot.child, slot.proven = slot.child, None, False
        return time.monotonic() - child.started_s, status_text(child.reap())

    async def _stopped_within(self, delay_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        return self._stopping.is_set()


def status_text(returncode: int) -> str:
    """ "0" or "1" for an exit status, "SIGKILL" for a signal."""
    if returncode >= 0:
        return str(returncode)
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def local_workers(
    settings: ServeSettings, leader: str, *, on_restart: Callable[[int], None] | None = None
) -> Supervisor:
    """The supervisor of the local workers, one for each replica of each stage.

    Args:
        settings: of the leader, the token included. Local workers take theirs from these and from nowhere else.
        leader: "HOST:PORT" at which this machine reaches the join port.
        on_restart: called with the slot of each worker that was started again.
    Raises:
        UserError: the device is not there.
    """
    threads = settings.worker_threads or fair_threads(settings.num_workers)
    devices = spread(settings.device, settings.num_workers)
    shared = {
        "leader": leader,
        "threads": threads,
        "heartbeat_interval_s": settings.heartbeat_interval_s,
        "heartbeat_timeout_s": settings.heartbeat_timeout_s,
        "join_timeout_s": settings.join_timeout_s,
        "log_level": settings.log_level,
        "log_format": settings.log_format,
    }
    # -P: a folder named `cli` in the working directory must not be taken for ours.
    program = [sys.executable, "-P", "-m", "cli.main"]
    base = [*program, "worker", "--exit-with-parent"]
    base += [part for name, value in shared.items() for part in (option(name), str(value))]
    return Supervisor(
        lambda slot: [*base, "--name", worker_name(slot), "--device", devices[slot]],
        settings.num_workers,
        environment=worker_environment(settings, threads),
        reserve=[*program, "reserve"],
        on_restart=on_restart,
    )


def worker_name(slot: int) -> str:
    """The name by which the local worker of this slot joins."""
    return f"local-{slot}"


def worker_environment(settings: ServeSettings, threads: int) -> dict[str, str]:
    """This process's environment without the leader's own settings, but with the token, which no argument may show."""
    assert settings.token is not None, "the token is settled before workers start"
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    return {
        **inherited,
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        ENV_PREFIX + "TOKEN": settings.token.get_secret_value(),
    }


def fair_threads(num_workers: int) -> int:
    """Threads for each of so many workers, so that together they use the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)
