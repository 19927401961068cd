"""Computes batches on one device, on a dedicated thread, so that the event loop never blocks on a model."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multiworld_serving.models import (
    NO_TUNING,
    BundleStageSpec,
    CompileRequest,
    OptimizedStage,
    Tuning,
    compiled_mode,
    load_bundle_stage,
    may_be_compiled,
    optimize,
    torch_threads,
)
from multiworld_serving.workers.compute.compiler import Compiler
from multiworld_serving.workers.compute.cores import SharedCores
from multiworld_serving.workers.compute.fair_queue import FairQueue
from multiworld_serving.workers.compute.stage_store import LoadedStage, StageStore
from multiworld_serving.workers.compute.transfers import Allocate, transfers_for
from multiworld_serving.workers.exit_timer import OUT_OF_MEMORY_EXIT_S, arm_exit_timer

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Job:
    call: Callable[[], Any]
    future: asyncio.Future[Any]
    is_batch: bool = False


class Engine:
    """Runs jobs one at a time on one daemon thread, so that a model that never returns does not block the process's exit.

    Callers submit jobs through an `EngineQueue`, one for each leader. Batches of several queues get equal shares of the time, however
    many and how large they are (see `FairQueue`). Loading is not counted, so that a leader that loads a stage is served meanwhile.

    Args:
        cores: cores shared with other workers of this machine; None computes on torch's number of threads.
        compiler: loads and creates compiled stages; None uses none.

    Attributes:
        stages: the stages that are loaded, shared by all queues.
    """

    def __init__(
        self, device: torch.device, cores: SharedCores | None = None, compiler: Compiler | None = None
    ) -> None:
        self.device = device
        self.transfers = transfers_for(device)
        self.compiler = compiler
        self._cores = cores
        self.stages = StageStore()
        self._jobs: FairQueue[EngineQueue, _Job] = FairQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._current: EngineQueue | None = None
        self._current_since_s = 0.0
        self._current_is_batch = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def new_queue(self) -> "EngineQueue":
        """A new queue without jobs and stages."""
        return EngineQueue(self)

    def close(self) -> None:
        """Let the thread end after all submitted jobs. Does not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    @property
    def busy(self) -> bool:
        """Whether a job of any queue is running."""
        return self._current is not None

    def busy_s(self, queue: "EngineQueue") -> float:
        """Seconds that the current job of this queue has been running; 0 if none is."""
        with self._changed:
            return time.monotonic() - self._current_since_s if self._current is queue else 0.0

    def others_us(self, queue: "EngineQueue") -> int:
        """About how long this queue's next batch waits for those of other queues: for one of each that has jobs."""
        with self._changed:
            return sum(other.computed_ns // 1000 for other in self._jobs.owners() if other is not queue)

    def waits_for_others(self, queue: "EngineQueue") -> bool:
        """Whether jobs of this queue wait while a job of another queue runs."""
        with self._changed:
            return self._current not in (None, queue) and self._jobs.has_jobs(queue)

    def is_loading(self, queue: "EngineQueue") -> bool:
        """Whether a job of this queue is running that loads a stage rather than computes a batch."""
        with self._changed:
            return self._current is queue and not self._current_is_batch

    @property
    def threads(self) -> tuple[int, ...]:
        """Numbers of threads that may compute a batch, ascending."""
        return (torch.get_num_threads(),) if self._cores is None else self._cores.thread_counts

    def warm_up_shapes(self, max_batch_size: int) -> list[tuple[int, int]]:
        """(batch size, threads) to warm up: the largest batch with the fewest threads, and a single sample with each thread count."""
        shapes = {(max_batch_size, self.threads[0]), *((1, threads) for threads in self.threads)}
        return sorted(shapes, reverse=True)

    @contextmanager
    def acquire_cores(self, stage: Hashable, elements: int) -> Iterator[None]:
        """Use this worker's share of the cores while the block runs. Called on the engine's thread.

        Args: see `SharedCores.acquire_cores`.
        """
        if self._cores is None:
            yield
            return
        with self._cores.acquire_cores(stage, elements) as threads:
            if threads != torch.get_num_threads():
                torch.set_num_threads(threads)
            yield

    async def run(self, queue: "EngineQueue", call: Callable[[], Any], *, is_batch: bool = False) -> Any:
        """Run `call` on the engine's thread and return its result. Raises what `call` raises."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._jobs.add(queue, _Job(call, future, is_batch))
            self._changed.notify()
        return await future

    def discard_pending(self, queue: "EngineQueue") -> None:
        """Remove the jobs of this queue that have not started."""
        with self._changed:
            self._jobs.remove(queue)

    def _next(self) -> _Job | None:
        """Wait for the next job. None when closed and all jobs are done."""
        with self._changed:
            if self._current is not None and self._current_is_batch:
                self._jobs.charge(self._current, time.monotonic() - self._current_since_s)
            self._current = None
            while not self._jobs:
                if self._closed:
                    return None
                self._changed.wait()
            self._current, job = self._jobs.take()
            self._current_since_s = time.monotonic()
            self._current_is_batch = job.is_batch
            return job

    def _work(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # per thread; CUDA graphs are recorded on the current device
        while (job := self._next()) is not None:
            if job.future.cancelled():
                del job  # its tensors may lie in memory of another process
                continue
            result, error = None, None
            try:
                result = job.call()
            except Exception as failure:  # noqa: BLE001 - passed on to the caller
                error = failure
            try:
                job.future.get_loop().call_soon_threadsafe(_resolve, job.future, result, error)
            except RuntimeError:  # the loop is closed
                return
            except MemoryError:
                arm_exit_timer(OUT_OF_MEMORY_EXIT_S)  # the caller would wait forever
            del job, result, error  # free the tensors before waiting for the next job


@dataclass(frozen=True, slots=True)
class Computed:
    """A computed batch.

    Attributes:
        output: on the CPU.
        compute_ns, waited_us, others_us: see `Message`.
    """

    output: Tensor
    compute_ns: int
    waited_us: int
    others_us: int


class EngineQueue:
    """The stages and jobs of one session. Jobs of one queue run in the order of submission.

    Attributes:
        computed_ns: how long the last batch took.
    """

    def __init__(self, engine: Engine) -> None:
        self.computed_ns = 0
        self._engine = engine
        self._stages: dict[tuple[int, int], LoadedStage] = {}
        """By version and stage."""
        self._unloaded: set[int] = set()
        """Versions that were unloaded, possibly while they were loading."""

    @property
    def busy_s(self) -> float:
        """Seconds that the current job of this queue has been running; 0 if none is."""
        return self._engine.busy_s(self)

    @property
    def waits_for_others(self) -> bool:
        """Whether jobs of this queue wait while a job of another leader runs."""
        return self._engine.waits_for_others(self)

    @property
    def is_loading(self) -> bool:
        """Whether the current job of this queue loads a stage rather than computes a batch."""
        return self._engine.is_loading(self)

    async def load(
        self,
        spec: BundleStageSpec,
        weights: bytearray,
        sample_shape: tuple[int, ...],
        max_batch_size: int,
        tuning: Tuning = NO_TUNING,
        *,
        aside: bool = False,
    ) -> OptimizedStage:
        """Build a stage, load its weights, optimize it, and warm it up with each of `warm_up_shapes`. Call `serve` next.

        Each step is a job of its own, so batches of other stages and versions are computed in between.

        Args:
            aside: build it in another thread while batches are computed. For CPUs.

        Raises:
            ModelError, RuntimeError: the weights do not match the spec, or the device cannot run it.
        """
        build = partial(self._build, spec, weights, sample_shape, max_batch_size, tuning)
        made: OptimizedStage = await (asyncio.to_thread(build) if aside else self._engine.run(self, build))
        for batch_size, threads in self._engine.warm_up_shapes(max_batch_size):
            batch = spec.example(batch_size, sample_shape)
            await self._engine.run(self, partial(self._warm_up, made.module, batch, threads))
        return made

    def expect(self, version: int) -> None:
        """A stage of this version is about to be loaded. Numbers of versions that failed to load are reused."""
        self._unloaded.discard(version)

    def serve(self, version: int, stage: LoadedStage) -> None:
        """Compute batches of this version with this stage, unless the version was unloaded since `expect`."""
        if version not in self._unloaded:
            self._stages[version, stage.spec.index] = stage

    def unload(self, version: int) -> None:
        """Stop serving this version's stages, including any still loading."""
        self._unloaded.add(version)
        self._stages = {key: stage for key, stage in self._stages.items() if key[0] != version}

    async def compute(
        self,
        version: int,
        stage: int,
        batch: Tensor,
        float32_as: torch.dtype = torch.float32,
        allocate: Allocate | None = None,
    ) -> Computed:
        """Compute a batch.

        Args:
            batch: of the dtype of the stage's input, or as it travels, which is converted.
            float32_as: dtype of the output if the stage computes float32.
            allocate: makes the memory for the output; None: any memory.
        Raises what the stage raises, and KeyError if the stage is not loaded in this version.
        """
        asked_ns = time.perf_counter_ns()
        arrived = self._engine.transfers.to_device(batch)

        def compute() -> Computed:
            started_ns = time.perf_counter_ns()
            loaded = self._stages[version, stage]
            with self._engine.acquire_cores((version, stage), batch.numel()):
                rows = arrived().to(loaded.spec.input_dtype)
                output = self._forward(loaded.optimized.module, rows, float32_as, allocate)
            self.computed_ns = time.perf_counter_ns() - started_ns
            return Computed(output, self.computed_ns, (started_ns - asked_ns) // 1000, self._engine.others_us(self))

        result: Computed = await self._engine.run(self, compute, is_batch=True)
        return result

    def close(self) -> None:
        """Discard pending jobs and stop serving."""
        self._engine.discard_pending(self)
        self._stages = {}

    def _build(
        self,
        spec: BundleStageSpec,
        weights: bytearray,
        sample_shape: tuple[int, ...],
        max_batch_size: int,
        tuning: Tuning,
    ) -> OptimizedStage:
        engine, compiled = self._engine, None
        stage = load_bundle_stage(spec, weights)
        if engine.compiler is not None and may_be_compiled(tuning, engine.device):
            compiled = engine.compiler.load(self._request(spec, weights, sample_shape, max_batch_size, tuning))
        return optimize(stage, sample_shape, max_batch_size, tuning, engine.device, compiled, engine.threads)

    async def compile(
        self,
        spec: BundleStageSpec,
        weights: bytearray,
        sample_shape: tuple[int, ...],
        max_batch_size: int,
        tuning: Tuning,
    ) -> bool:
        """Compile a stage in the background for the next `load`. Returns whether it succeeded; the log says why not."""
        compiler = self._engine.compiler
        if compiler is None:
            return False
        request = self._request(spec, weights, sample_shape, max_batch_size, tuning)
        return await compiler.compile(request, asked=tuning.optimize == "compile")

    def _request(
        self,
        spec: BundleStageSpec,
        weights: bytearray,
        sample_shape: tuple[int, ...],
        max_batch_size: int,
        tuning: Tuning,
    ) -> CompileRequest:
        precision = compiled_mode(tuning, self._engine.device).precision
        return CompileRequest(spec, sample_shape, max_batch_size, precision, self._engine.threads, weights)

    def _warm_up(self, stage: nn.Module, batch: Tensor, threads: int) -> None:
        with torch_threads(threads):
            self._forward(stage, self._engine.transfers.to_device(batch)())

    def _forward(
        self,
        stage: nn.Module,
        batch: Tensor,
        float32_as: torch.dtype = torch.float32,
        allocate: Allocate | None = None,
    ) -> Tensor:
        with torch.inference_mode():
            return self._engine.transfers.to_host(stage(batch), float32_as, allocate)


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
