"""Starts a process of a handler when a call needs one, calls it, and ends it if it does not return in time.

Each process is a `ProcessPoolExecutor` of its own with one worker, because a worker that ends breaks its executor.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.service.errors import HandlerError, HandlerInputError, OverloadedError
from multiworld_serving.server.frontend.api.handler import program
from multiworld_serving.server.frontend.api.handler.program import Outcome

T = TypeVar("T")

_LOAD_S = 60.0
"""Longest time for loading a handler."""
_MAX_TEXT_CHARS = 1000


class _HandlerProcess:
    """One process, which loads the user's handler first."""

    def __init__(self, where: str) -> None:
        self._executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        before = set(multiprocessing.active_children())
        self.loading: Future[Outcome[None]] = self._executor.submit(program.load, where)
        (self._child,) = set(multiprocessing.active_children()) - before

    def submit(self, function: Callable[..., Outcome[T]], *arguments: object) -> Future[Outcome[T]]:
        """Call this function of `program` there."""
        return self._executor.submit(function, *arguments)

    def kill(self, *, wait: bool = False) -> None:
        """End the process. With `wait` its semaphores are removed before the method returns."""
        self._child.kill()
        self._executor.shutdown(wait, cancel_futures=True)


class HandlerProcesses:
    """At most so many processes; the first one starts on entry, others when calls are made at the same time.

    Args:
        where: FILE.py:CLASS.
        timeout_s: longest time of one call; its process is then replaced.
        max_waiting: maximum number of calls that wait for a process; further ones are rejected.
    """

    def __init__(self, where: str, timeout_s: float, *, processes: int = 4, max_waiting: int = 256) -> None:
        file, separator, name = where.rpartition(":")
        self._where = f"{Path(file).absolute()}{separator}{name}" if separator else where
        self._timeout_s = timeout_s
        self._max_waiting = max_waiting
        self._free = asyncio.Semaphore(processes)
        self._idle: list[_HandlerProcess] = []
        self._all: set[_HandlerProcess] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.waiting = 0
        """Number of calls that wait for a process."""

    def __enter__(self) -> Self:
        """Raises UserError if the handler cannot be loaded."""
        try:
            process = self._start()
            _result(process.loading.result(_LOAD_S))
        except (HandlerError, BrokenProcessPool, OSError) as error:  # also TimeoutError, which has no text
            self.__exit__(None, None, None)
            raise UserError(f"--handler {self._where}: {str(error) or 'loading takes too long'}") from error
        self._idle.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all processes."""
        for process in self._all:
            process.kill(wait=True)

    async def call(self, function: Callable[..., Outcome[T]], *arguments: object) -> T:
        """Call `program.decode` or `program.encode` in a process. If cancelled, the process completes the call.

        Raises:
            OverloadedError: too many calls wait.
            HandlerInputError: the handler raised ValueError.
            HandlerError: another error, or the process ended or did not return in time. A later call starts another one.
        """
        if self._free.locked() and self.waiting >= self._max_waiting:
            raise OverloadedError(f"{self.waiting} bodies wait for the handler, which is the limit; try again later")
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        task = asyncio.create_task(self._run(function, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return _result(await asyncio.shield(task))

    async def _run(self, function: Callable[..., Outcome[T]], arguments: tuple[object, ...]) -> Outcome[T]:
        """Call on an idle process, or on a new one. The caller has acquired `_free`."""
        process = None
        try:
            process = self._idle.pop() if self._idle else self._start()
            async with asyncio.timeout(_LOAD_S):
                _result(await asyncio.wrap_future(process.loading))
            async with asyncio.timeout(self._timeout_s):
                outcome = await asyncio.wrap_future(process.submit(function, *arguments))
            self._idle.append(process)
            return outcome
        except TimeoutError:
            error = f"the handler did not return within {self._timeout_s:.3g} s"
        except BrokenProcessPool:
            error = "the handler's process has ended"
        except HandlerError as failure:
            error = str(failure)
        except Exception as failure:  # noqa: BLE001 - such as no memory for another process
            error = f"the handler cannot be called: {type(failure).__name__}: {failure}"
        finally:
            self._free.release()
        if process is not None:
            self._all.discard(process)
            process.kill()
        return "failed", error

    def _start(self) -> _HandlerProcess:
        process = _HandlerProcess(self._where)
        self._all.add(process)
        return process


def _result(outcome: Outcome[T]) -> T:
    if outcome[0] == "result":
        return outcome[1]
    if outcome[0] == "invalid":
        raise HandlerInputError(outcome[1][:_MAX_TEXT_CHARS])
    raise HandlerError(outcome[1])
