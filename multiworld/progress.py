"""The thread that runs the operations of a process group, and the `Work` that torch waits for."""

import _thread
import asyncio
import atexit
import contextlib
import inspect
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import Work
from torch.distributed import DistBackendError

from multiworld.errors import Cause
from multiworld.execution.outcome import Outcome
from multiworld.execution.threads import DaemonThread
from multiworld.manager import WorldManager

_CLOSE_S = 20.0
"""Longer than `WorldManager.aclose` takes."""
_LAST_S = 1.0
"""How long a thread that ends waits until the operations of its worlds, which have ended, have failed."""
_ENDED = "the progress thread of the group has ended"

T = TypeVar("T")


class GroupBrokenError(DistBackendError):
    """The operation failed because its group has ended. `__cause__` is the error of the world, usually a BrokenWorldException.

    Autograd turns it into a RuntimeError with this text. `WorldProcessGroup.failure` tells it from other errors.
    """


def never_compiled(cls: type[T]) -> type[T]:
    """Let torch's compiler call the methods of a class. It cannot trace them, because the class is a subclass of a class in C++."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and name != "__init__":
            setattr(cls, name, torch.compiler.disable(method))  # type: ignore[no-untyped-call]
    return cls


class ProgressThread:
    """An event loop on a daemon thread, which serves the worlds of one manager.

    Every future of `run` completes: with an error if the thread ends before, or does not exist because this process was forked. It takes no
    locks, because finalizers may run on any thread, and a forked process would inherit a lock that is held.
    """

    def __init__(self, name: str, manager: WorldManager) -> None:
        self._manager = manager
        self._loop = asyncio.new_event_loop()
        self._unfinished: set[Future[Any]] = set()
        self._stopping: asyncio.Task[None] | None = None
        self._thread = DaemonThread(self._serve, name)

    def start(self) -> None:
        """Start the thread. Raises RuntimeError when it does not start."""
        self._thread.start()
        _started.add(self)

    def check(self) -> None:
        """Raises RuntimeError unless the thread is alive. It is not in a forked process, which must not use connections of its parent."""
        if not self._thread.is_alive():
            raise RuntimeError(_ENDED)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. Coroutines start in the order of these calls."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                outcome = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
                self._unfinished.add(outcome)
                outcome.add_done_callback(self._unfinished.discard)
                if self._loop.is_closed():  # in the meantime
                    _fail(outcome)
                return outcome
        coroutine.close()
        _fail(outcome := Future())
        return outcome

    def stop(self) -> None:
        """Close the worlds, which fails their pending operations, then end the thread. Does not block."""

        async def close() -> None:
            try:
                await self._manager.aclose()
            finally:
                self._loop.stop()

        def begin() -> None:
            if self._stopping is None:
                self._stopping = self._loop.create_task(close())

        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(begin)

    def join(self) -> None:
        """Wait until the thread has ended, at most for 20 s."""
        self._thread.join(_CLOSE_S)

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            for world in self._manager.worlds.values():  # there are none after `stop`
                world.fail(Cause.LOCAL, world.rank, "its progress thread has ended")
            try:
                with contextlib.suppress(RuntimeError):  # `stop` was called just now
                    self._loop.run_until_complete(_report_failures())
            finally:
                self._loop.close()
                for outcome in list(self._unfinished):
                    _fail(outcome)
                self._manager.cleanup()


async def _report_failures() -> None:
    await asyncio.sleep(0)
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(tasks, timeout=_LAST_S)
    await asyncio.sleep(0)  # for the callbacks of the last one


def _fail(outcome: Future[Any]) -> None:
    with contextlib.suppress(InvalidStateError):  # complete
        outcome.set_exception(RuntimeError(_ENDED))


@never_compiled
class WorldWork(Work):
    """An operation that runs on the progress thread.

    Args:
        results: the value of `get_future` and `result`: the tensors that the operation writes.
        outcome: completes with the operation.
        devices: the GPUs of the results.
        serve: called by a thread that waits, with a limit in seconds. May return before the outcome is known.
    """

    def __init__(
        self,
        results: Sequence[Any],
        outcome: Future[None] | Outcome,
        devices: Iterable[torch.device] = (),
        serve: Callable[[float | None], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._serve = serve
        self._devices: list[int | str | torch.device] = [*devices]
        self._results = list(results)
        self._outcome = outcome

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operation is complete. It continues when `timeout` expires, so the caller may wait again. 0 means no limit.

        Raises:
            GroupBrokenError: the group has ended.
            DistBackendError: the timeout expired.
        """
        limit_s = timeout.total_seconds() if timeout > timedelta(0) else None
        try:
            if not self._outcome.done():
                self._serve(limit_s)
            error = self._outcome.exception(limit_s)
        except TimeoutError:
            raise DistBackendError(
                f"the operation is not complete after {limit_s:g} s; wait again, or abort the group"
            ) from None
        if error is not None:
            raise GroupBrokenError(
                f"{error}. This group has ended. Let the remaining members form a new group (WorldProcessGroup.form or from_store), and "
                "wrap the modules again"
            ) from error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future. If the operation fails, it raises RuntimeError with the same text.

        Its callbacks run on a thread of their own, because they may wait for another operation, as those of PowerSGD do.
        """
        source: torch.futures.Future[Any] = torch.futures.Future(devices=self._devices)

        # `set_exception` of torch would let C++ code take the exception for the value.
        def value(_: object) -> list[Any]:
            self.wait()
            return self._results

        def complete(_: object) -> None:
            try:
                _thread.start_new_thread(source.set_result, (None,))
            except RuntimeError:  # too many threads
                source.set_result(None)

        future = source.then(value)
        self._outcome.add_done_callback(complete)
        return future

    def is_completed(self) -> bool:
        return self._outcome.done()

    def is_success(self) -> bool:
        return self._outcome.done() and self._outcome.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the world; None while the operation is pending and after it has succeeded."""
        return self._outcome.exception() if self._outcome.done() else None

    def result(self) -> list[Any]:
        return self._results

    def synchronize(self) -> None:
        self.wait()


_started: weakref.WeakSet[ProgressThread] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """Leave the groups at process exit, and let no thread compute while the interpreter ends."""
    threads = list(_started)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join()
