"""The computing half of a worker: its stages on one device, on a thread of its own, so that the event loop never waits for it."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from models import (
    AS_IT_IS,
    CompileRequest,
    Optimized,
    StageSpec,
    Tuning,
    build_stage,
    compiled_recipe,
    computing_on,
    optimize,
)
from workers.compiler import Compiler
from workers.cores import SharedCores
from workers.last_resort import NO_MEMORY_S, end_within
from workers.transfers import transfers

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    is_batch: bool = False


class Engine:
    """Runs jobs one at a time on one daemon thread: a model that never returns holds up nobody else's exit.

    Who wants to compute takes a `Place`. Places that have jobs take turns, one job each: no leader can crowd out another.

    Args:
        cores: shared with other workers of this machine, where they are; batches are computed on as many as are free.
        compiler: has the stages that were compiled; without one there are none.
    """

    def __init__(
        self, device: torch.device, cores: SharedCores | None = None, compiler: Compiler | None = None
    ) -> None:
        self.device = device
        self.transfers = transfers(device)
        self.compiler = compiler
        self._cores = cores
        self._turns: deque[Place] = deque()
        """Places with jobs, the next one first."""
        self._news = threading.Condition()
        self._closed = False
        self._current: Place | None = None
        self._current_since_s = 0.0
        self._current_is_batch = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def place(self) -> "Place":
        """A new place, with no stages yet."""
        return Place(self)

    def close(self) -> None:
        """Let the thread end once its jobs are done. Does not wait."""
        with self._news:
            self._closed = True
            self._news.notify()

    @property
    def busy(self) -> bool:
        """Whether a job is running, whosever it is."""
        return self._current is not None

    def busy_s(self, place: "Place") -> float:
        """How long a job of this place has been running; 0 when none is."""
        with self._news:
            return time.monotonic() - self._current_since_s if self._current is place else 0.0

    def loads(self, place: "Place") -> bool:
        """Whether a job of this place is running that computes no batch, but makes a stage."""
        with self._news:
            return self._current is place and not self._current_is_batch

    @property
    def threads(self) -> tuple[int, ...]:
        """How many may compute a batch, ascending: it depends on who else computes."""
        return (torch.get_num_threads(),) if self._cores is None else self._cores.shares

    def kinds_of_work(self, max_batch_size: int) -> list[tuple[int, int]]:
        """Rows and threads: the largest batch as when everybody computes, and a lone row on whatever is free."""
        kinds = {(max_batch_size, self.threads[0]), *((1, threads) for threads in self.threads)}
        return sorted(kinds, reverse=True)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around what computes a batch, on the thread: takes the cores that are free."""
        if self._cores is None:
            yield
            return
        with self._cores.computing() as threads:
            if threads != torch.get_num_threads():
                torch.set_num_threads(threads)
            yield

    async def run(self, place: "Place", call: Callable[[], Any], *, is_batch: bool = False) -> Any:
        """The result of `call`, made on the thread when it is this place's turn. Raises what it raises."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._news:
            if not place.jobs:
                self._turns.append(place)
            place.jobs.append(_Job(call, future, is_batch))
            self._news.notify()
        return await future

    def leave(self, place: "Place") -> None:
        """Forget the jobs of this place that have not begun."""
        with self._news:
            place.jobs.clear()
            if place in self._turns:
                self._turns.remove(place)

    def _next(self) -> _Job | None:
        """The next job, waited for; None when closed and all is done."""
        with self._news:
            self._current = None
            while not self._turns:
                if self._closed:
                    return None
                self._news.wait()
            place = self._turns.popleft()
            job = place.jobs.popleft()
            if place.jobs:
                self._turns.append(place)
            self._current, self._current_since_s = place, time.monotonic()
            self._current_is_batch = job.is_batch
            return job

    def _work(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread; graphs are recorded on the device that is current
        while (job := self._next()) is not None:
            if job.future.cancelled():
                continue
            result, error = None, None
            try:
                result = job.call()
            except Exception as failure:  # noqa: BLE001 - whatever a model raises is the batch's outcome, not our end
                error = failure
            try:
                job.future.get_loop().call_soon_threadsafe(_settle, job.future, result, error)
            except RuntimeError:  # the loop has ended
                return
            except MemoryError:
                end_within(NO_MEMORY_S)  # somebody waits for this for ever
            del job, result, error  # a tensor must not live until the next job comes


class Place:
    """One session's stages and jobs at the engine. Jobs of one place run in the order in which they were asked for."""

    def __init__(self, engine: Engine) -> None:
        self.jobs: deque[_Job] = deque()
        """Guarded by the engine."""
        self._engine = engine
        self._stages: dict[tuple[int, int], nn.Module] = {}
        """By version and stage."""
        self._dropped: set[int] = set()
        """Versions that were dropped, perhaps while they are loaded."""

    @property
    def busy_s(self) -> float:
        """How long a job of ours has been running; 0 when none is."""
        return self._engine.busy_s(self)

    @property
    def loads(self) -> bool:
        """Whether what is running makes a stage, and computes no batch."""
        return self._engine.loads(self)

    async def load(
        self,
        version: int,
        spec: StageSpec,
        weights: bytes,
        row_shape: tuple[int, ...],
        max_batch_size: int,
        tuning: Tuning = AS_IT_IS,
    ) -> tuple[float, Optimized]:
        """Build a stage, load its weights, make it fast and run it once for each kind of work: what is new takes longer.

        Gives the seconds taken, and what the stage became.

        Each of these is a job of its own: batches of other stages and versions are computed between them.

        Raises:
            StageError, RuntimeError, safetensors.SafetensorError: spec and weights do not fit each other, or this device.
        """
        started_s = time.monotonic()
        self._dropped.discard(version)  # numbers of versions that could not be loaded are given again
        made: Optimized = await self._engine.run(
            self, lambda: self._build(spec, weights, row_shape, max_batch_size, tuning)
        )
        dtype = torch.uint8 if spec.is_first else torch.float32
        for rows, threads in self._engine.kinds_of_work(max_batch_size):
            batch = torch.zeros((rows, *row_shape), dtype=dtype)
            await self._engine.run(self, partial(self._warm_up, made.module, batch, threads))
        if version not in self._dropped:
            self._stages[version, spec.index] = made.module
        return time.monotonic() - started_s, made

    def holds(self, version: int, stage: int) -> bool:
        """Whether that stage is loaded and was not dropped."""
        return (version, stage) in self._stages

    def drop(self, version: int) -> None:
        """Forget the stages of a version, those that are being loaded now included."""
        self._dropped.add(version)
        self._stages = {key: stage for key, stage in self._stages.items() if key[0] != version}

    async def compute(self, version: int, stage: int, batch: Tensor) -> tuple[Tensor, int, int]:
        """A stage's output for a batch: (CPU tensor, nanoseconds computed, nanoseconds waited).

        Raises what the stage raises, and KeyError when that stage was never ordered in that version.
        """
        asked_ns = time.perf_counter_ns()
        arrived = self._engine.transfers.up(batch)

        def compute() -> tuple[Tensor, int, int]:
            started_ns = time.perf_counter_ns()
            with self._engine.computing():
                output = self._forward(self._stages[version, stage], arrived)
            return output, time.perf_counter_ns() - started_ns, started_ns - asked_ns

        result: tuple[Tensor, int, int] = await self._engine.run(self, compute, is_batch=True)
        return result

    def close(self) -> None:
        """Forget what has not begun, and the stages."""
        self._engine.leave(self)
        self._stages = {}

    def _build(
        self, spec: StageSpec, weights: bytes, row_shape: tuple[int, ...], max_batch_size: int, tuning: Tuning
    ) -> Optimized:
        engine, compiled = self._engine, None
        stage = build_stage(spec)
        stage.load_state_dict(safetensors.torch.load(weights), strict=True)
        if engine.compiler is not None and tuning.optimize in ("compile", "auto"):
            compiled = engine.compiler.found(self._request(spec, weights, row_shape, max_batch_size, tuning))
        return optimize(stage, row_shape, max_batch_size, tuning, engine.device, compiled, engine.threads)

    async def compile(
        self, spec: StageSpec, weights: bytes, row_shape: tuple[int, ...], max_batch_size: int, tuning: Tuning
    ) -> bool:
        """Have a stage compiled, in the background, for the next `load`. Gives whether that was possible; the log says why not."""
        compiler = self._engine.compiler
        if compiler is None:
            return False
        return await compiler.compile(self._request(spec, weights, row_shape, max_batch_size, tuning))

    def _request(
        self, spec: StageSpec, weights: bytes, row_shape: tuple[int, ...], max_batch_size: int, tuning: Tuning
    ) -> CompileRequest:
        precision = compiled_recipe(tuning, self._engine.device).precision
        return CompileRequest(spec, row_shape, max_batch_size, precision, weights)

    def _warm_up(self, stage: nn.Module, batch: Tensor, threads: int) -> None:
        with computing_on(threads):
            self._forward(stage, self._engine.transfers.up(batch))

    def _forward(self, stage: nn.Module, arrived: Callable[[], Tensor]) -> Tensor:
        with torch.inference_mode():
            return self._engine.transfers.down(stage(arrived()))


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
