"""The thread on which an engine computes."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from multiworld_serving.workers.exit_timer import OUT_OF_MEMORY_EXIT_S, arm_exit_timer


@dataclass(slots=True, eq=False)
class Job:
    """A call on the thread.

    Attributes:
        owner: who has submitted it.
        is_batch: whether it computes a batch; otherwise it loads a stage.
        begun_s: when it began, as `time.monotonic()`.
    """

    owner: object
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    is_batch: bool = False
    begun_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Launched:
    """What a job returns if a GPU continues with it.

    Attributes:
        finish: waits for the result. The next batch is launched before, so that the GPU always has work.
    """

    finish: Callable[[], Any]


class JobThread:
    """Runs jobs one at a time, in the order of submission, on a daemon thread: a model that never returns blocks no exit of the process.

    Args:
        prepare: called on the thread before the first job.
        on_error: called on the thread after each error of a job.

    Attributes:
        current: the running job.
    """

    def __init__(self, prepare: Callable[[], object], on_error: Callable[[], object]) -> None:
        self.current: Job | None = None
        self._prepare, self._on_error = prepare, on_error
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        """None ends the thread."""
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    async def run(self, owner: object, call: Callable[[], Any], *, is_batch: bool = False) -> Any:
        """Run `call` on the thread and return its result. Raises what `call` raises. Cancelling drops a job that has not begun."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._jobs.put(Job(owner, call, future, is_batch))
        return await future

    def close(self) -> None:
        """Let the thread end after all submitted jobs. Does not wait."""
        self._jobs.put(None)

    def _work(self) -> None:
        self._prepare()
        launched: tuple[Job, Callable[[], Any]] | None = None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while True:
                if launched is not None and self._jobs.empty():
                    launched = self._perform(*launched)
                job, (before, launched) = self._jobs.get(), (launched, None)
                # The result of a batch does not wait until a stage is loaded.
                if before is not None and (job is None or not job.is_batch):
                    before = self._perform(*before)
                if job is None:
                    return
                if not job.future.cancelled():
                    job.begun_s = time.monotonic()
                    launched = self._perform(job, job.call)
                if before is not None:
                    before = self._perform(*before)
                    self.current = None if launched is None else launched[0]
                del job  # its tensors may lie in memory of another process

    def _perform(self, job: Job, call: Callable[[], Any]) -> tuple[Job, Callable[[], Any]] | None:
        """Call, and complete the job. Returns how to finish it if the GPU continues with it. Raises RuntimeError if its loop is closed."""
        self.current, result, error = job, None, None
        try:
            result = call()
        except Exception as failure:  # noqa: BLE001 - passed on to the caller
            error = failure
            self._on_error()
        if isinstance(result, Launched):
            return job, result.finish
        try:
            job.future.get_loop().call_soon_threadsafe(_resolve, job.future, result, error)
        except MemoryError:
            arm_exit_timer(OUT_OF_MEMORY_EXIT_S)  # the caller would wait forever
        self.current = None
        return None


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
