"""Computes batches on one device, on a dedicated thread, so that the event loop never blocks on a model."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakValueDictionary

import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor, nn

from multiworld_serving.common.config.process import check_memory, release_free_memory
from multiworld_serving.models.bundle.stage import BundleStageSpec, load_bundle_stage
from multiworld_serving.models.errors import StageSpecError
from multiworld_serving.models.optimize.compiled import CompiledStage, batch_sizes
from multiworld_serving.models.optimize.convolutions import torch_threads
from multiworld_serving.models.optimize.optimizing import OptimizedStage, optimize
from multiworld_serving.models.optimize.tuning import NO_TUNING, ExecutionMode, Tuning
from multiworld_serving.models.stages.bundle_stage import BundleObjects
from multiworld_serving.models.stages.pipeline import PipelineSource
from multiworld_serving.models.stages.stage import (
    ObjectStage,
    ObjectStageSpec,
    PythonStage,
    StageSpec,
    load_python_stage,
)
from multiworld_serving.workers.compute.jobs import Job, JobThread, Launched
from multiworld_serving.workers.compute.transfers import Allocate, GpuTransfers, Transfers

logger = logging.getLogger(__name__)

KEEP_S = 30.0
"""How long stages stay in memory after the leader that has assigned them was lost."""
_COMPILER_BYTES = 1 << 30
"""Memory of the compiler besides weights."""
_COPIES_WHILE_COMPILING = 3
"""While a stage is compiled: received, as parameters, and folded."""
_SMALL_BATCH_S = 0.12
"""Operations of a batch are large enough to gain from more threads if its rows, one by one on one thread, take longer."""
_SEVERAL_ROWS = 8
"""Rows of the batch that stands for all batches of several rows."""
_ROUNDS = 3
_FASTER_FOR_ROW, _FASTER_FOR_BATCH = 1.1, 1.7
"""Several threads are used if they are this many times as fast as one. With many requests, frontends need cores, too."""


@dataclass(frozen=True)
class StageTask:
    """A stage that is to be loaded: its description, and the bytes that a leader has sent."""

    spec: StageSpec
    weights: Tensor
    max_batch_size: int
    tuning: Tuning = NO_TUNING


@dataclass(eq=False)
class LoadedStage:
    """A stage in memory. The session that serves it holds a reference; it is freed with the last one.

    Attributes:
        optimized: the module that computes it.
        row_threads, batch_threads: compute threads for one row, and for several. Measured when the stage is warmed up: for small
            operations one thread is faster.
        objects: computes rows that are objects; None: `optimized` computes the rows.
    """

    spec: StageSpec
    optimized: OptimizedStage
    row_threads: int
    batch_threads: int
    objects: ObjectStage | None = None

    def replace(self, other: "LoadedStage") -> None:
        """Compute with the module of another one from now on."""
        self.optimized, self.row_threads, self.batch_threads = other.optimized, other.row_threads, other.batch_threads
        if isinstance(self.objects, BundleObjects):
            self.objects.module = other.optimized


@dataclass(frozen=True, slots=True)
class ComputedBatch:
    """A computed batch.

    Attributes:
        output: on the CPU.
        compute_ns, waited_us: see `Message`.
    """

    output: Tensor
    compute_ns: int
    waited_us: int


class Engine:
    """Loads stages and computes batches, one at a time. Each has an owner, the session that has submitted it.

    Args:
        nice: by how much the priority of its thread is lower than that of others, see nice(2).
        allowed: the pipelines in Python that this process may run, by name.

    Attributes:
        stages: the stages in memory, by `StageAssignment.digest`. It holds no references: the session does, and then `keep`.
    """

    def __init__(
        self, device: torch.device, nice: int = 0, allowed: Mapping[str, PipelineSource] = MappingProxyType({})
    ) -> None:
        self.device = device
        self._allowed = allowed
        self._pool: ThreadPoolExecutor | None = None
        """Threads of stages that compute several batches at the same time."""
        self.transfers = GpuTransfers(device) if device.type == "cuda" else Transfers()
        self.stages: WeakValueDictionary[str, LoadedStage] = WeakValueDictionary()
        self._kept: list[LoadedStage] = []
        self._threads, self._nice = torch.get_num_threads(), nice
        self._loader: Engine | None = self if device.type == "cuda" else None
        self._ended_ns = 0
        """When the last batch was computed."""
        self.device_failed = False
        """True once this process can never use its GPU again."""
        self._jobs = JobThread(self._prepare, self._look_for_lost_device)

    @property
    def loader(self) -> "Engine":
        """The engine that builds and compiles stages: on a CPU that serves, another one, so that batches are computed meanwhile."""
        if self._loader is None:
            if not self.stages:
                return self
            self._loader = Engine(self.device, nice=10)  # batches get most of the time of a busy core
        return self._loader

    def close(self) -> None:
        """Let the thread end after all submitted jobs. Does not wait."""
        if self._loader not in (None, self):
            self._loader.close()
        self._jobs.close()

    def keep(self, stages: Iterable[LoadedStage]) -> None:
        """Keep these stages for the next leader for `KEEP_S`, or until memory for other ones is needed."""
        self._kept = kept = list(stages)
        asyncio.get_running_loop().call_later(KEEP_S, self._drop, kept)

    def drop_kept(self) -> None:
        """Free the stages of `keep` that no session uses."""
        self._drop(self._kept)

    def _drop(self, kept: list[LoadedStage]) -> None:
        kept.clear()
        release_free_memory()

    @property
    def busy(self) -> bool:
        """Whether a job is running."""
        return self._jobs.current is not None

    def job_of(self, owner: object) -> Job | None:
        """The running job, here or in the loader, that has this owner."""
        running = (engine._jobs.current for engine in (self, self._loader) if engine is not None)
        return next((job for job in running if job is not None and job.owner is owner), None)

    async def run(self, owner: object, call: Callable[[], Any], *, is_batch: bool = False) -> Any:
        """See `JobThread.run`."""
        return await self._jobs.run(owner, call, is_batch=is_batch)

    async def load(self, owner: object, task: StageTask) -> LoadedStage:
        """Build a stage, load its weights, optimize it, and warm it up.

        On a CPU, batches of other stages and versions are computed meanwhile; on a GPU, between the steps.

        Raises:
            ModelError, RuntimeError: the weights do not match the spec, or the device cannot run it.
        """

        spec = task.spec
        if isinstance(spec, ObjectStageSpec):
            if spec.bundle is None:
                return await self._load_python(owner, task, spec)
            found = await self.load(owner, replace(task, spec=spec.bundle))
            rows = spec.max_batch_size or task.max_batch_size
            optimized = found.optimized
            objects = BundleObjects(spec.bundle, optimized, self.device, spec.pad, rows, is_first=spec.is_first)
            return replace(found, spec=spec, objects=objects)

        def build() -> OptimizedStage:
            stage = load_bundle_stage(spec, task.weights)
            return optimize(stage, task.max_batch_size, task.tuning, self.device, (1, self._threads))

        return await self._warmed_up(owner, spec, task.max_batch_size, await self.loader.run(owner, build))

    async def _load_python(self, owner: object, task: StageTask, spec: ObjectStageSpec) -> LoadedStage:
        """Set up a class of a pipeline that the operator of this process has allowed. Raises as `load`."""
        source = self._allowed.get(spec.source)
        if source is None:
            raise StageSpecError(
                f"this worker may not run the pipeline {spec.source}: start it with --allow and the path of this pipeline"
            )
        if (digest := source.digest()) != spec.digest:
            raise StageSpecError(
                f"the pipeline {spec.source} has the digest {digest} here and {spec.digest} at the leader: install the same files on both"
            )
        load = partial(load_python_stage, spec, source, self.device, task.max_batch_size)
        objects: PythonStage = await self.loader.run(owner, load)
        optimized = OptimizedStage(nn.Identity(), ExecutionMode("eager"), f"stage in Python {spec.name}")
        return LoadedStage(spec, optimized, self._threads, self._threads, objects)

    async def compile(self, task: StageTask, is_needed: Callable[[], bool]) -> LoadedStage | None:
        """Compile a stage, and warm it up. On a CPU, batches are computed meanwhile; on a GPU, between two batch sizes.

        Args:
            is_needed: asked before each batch size.
        Returns None if it is not needed any more.

        Raises:
            CompileError: it cannot be compiled, or its code computes something else.
            MemoryError: there is not enough memory.
        """

        spec = task.spec.bundle if isinstance(task.spec, ObjectStageSpec) else task.spec
        if spec is None:
            return None

        def build() -> CompiledStage:
            sizes = len(batch_sizes(task.max_batch_size))  # each has the weights in its own layout
            check_memory(_COMPILER_BYTES + (_COPIES_WHILE_COMPILING + sizes) * task.weights.nbytes)
            stage = load_bundle_stage(spec, task.weights)
            return CompiledStage(stage, task.max_batch_size, task.tuning, self.device)

        made: CompiledStage = await self.loader.run(task, build)
        for size in made.sizes:
            if not is_needed():
                return None
            await self.loader.run(task, partial(made.compile_for, size))
        return await self._warmed_up(
            task, spec, task.max_batch_size, OptimizedStage(made, made.mode, "compiled while it served")
        )

    async def compute(
        self,
        owner: object,
        stage: LoadedStage,
        batch: Tensor,
        float32_as: torch.dtype = torch.float32,
        allocate: Allocate | None = None,
    ) -> ComputedBatch:
        """Compute a batch of this stage.

        Args:
            batch: of the dtype of the stage's input, or as it travels, which is converted.
            float32_as: dtype of the output if the stage computes float32.
            allocate: makes the memory for the output; None: any memory.
        Raises what the stage raises.
        """
        asked_ns = time.perf_counter_ns()
        objects = stage.objects
        arrived = self.transfers.to_device(batch) if objects is None else None

        def compute() -> Any:
            started_ns = time.perf_counter_ns()
            if arrived is None:
                assert objects is not None
                with torch_threads(stage.row_threads), torch.inference_mode():
                    output = objects.compute(self.transfers.writable(batch), allocate)
                return ComputedBatch(output, time.perf_counter_ns() - started_ns, (started_ns - asked_ns) // 1000)
            with torch_threads(stage.row_threads if len(batch) == 1 else stage.batch_threads):
                rows = arrived().to(stage.spec.input_rows.dtype)
                arriving = self._forward(stage.optimized, rows, float32_as, allocate)

            def finish() -> ComputedBatch:
                output, began_ns = arriving(), max(started_ns, self._ended_ns)  # a GPU computes one batch after another
                self._ended_ns = time.perf_counter_ns()
                return ComputedBatch(output, self._ended_ns - began_ns, (began_ns - asked_ns) // 1000)

            return Launched(finish) if self.device.type == "cuda" else finish()

        if objects is not None and objects.concurrency > 1:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(objects.concurrency, thread_name_prefix="stage")
            try:
                return await asyncio.get_running_loop().run_in_executor(self._pool, compute)
            except Exception:
                await self.run(owner, self._look_for_lost_device, is_batch=True)
                raise
        result: ComputedBatch = await self.run(owner, compute, is_batch=True)
        return result

    async def _warmed_up(
        self, owner: object, spec: BundleStageSpec, max_batch_size: int, optimized: OptimizedStage
    ) -> LoadedStage:
        """Run the shapes that batches will have, and find out how many threads to compute them on: those of another version if known."""
        share = self._threads
        for other in self.stages.values():
            is_version = isinstance(other.spec, BundleStageSpec) and spec == replace_fields(
                other.spec, version=spec.version
            )
            if is_version and other.optimized.mode == optimized.mode and self.device.type == "cpu":
                await self.loader.run(owner, partial(self._timed_s, optimized, spec.example(1), other.row_threads))
                return LoadedStage(spec, optimized, other.row_threads, other.batch_threads)
        for threads in (share, 1):  # the last one is the time of a row on one thread
            row_s = await self.run(owner, partial(self._timed_s, optimized, spec.example(1), threads))
        found = [share, share]
        several = max_batch_size if self.device.type == "cuda" else min(max_batch_size, _SEVERAL_ROWS)
        for index, batch_size in enumerate((1, several)):
            is_small, batch = batch_size * row_s <= _SMALL_BATCH_S, spec.example(batch_size)
            if is_small and share > 1:
                found[index] = await self.run(owner, partial(self._threads_of_small, optimized, batch))
            elif is_small or self.device.type == "cuda":  # the first large batch on a CPU takes no longer than others
                await self.run(owner, partial(self._timed_s, optimized, batch, share))
        return LoadedStage(spec, optimized, found[0], found[1])

    def _threads_of_small(self, stage: OptimizedStage, batch: Tensor) -> int:
        """Compare the best of several rounds in turn, because other processes may compute meanwhile."""
        counts = (1, self._threads)
        rounds = [[self._timed_s(stage, batch, threads) for threads in counts] for _ in range(1 + _ROUNDS)][1:]
        one_s, share_s = map(min, zip(*rounds, strict=True))
        faster = _FASTER_FOR_ROW if len(batch) == 1 else _FASTER_FOR_BATCH
        return self._threads if one_s > faster * share_s else 1

    def _timed_s(self, stage: OptimizedStage, batch: Tensor, threads: int) -> float:
        began_s = time.perf_counter()
        with torch_threads(threads):
            self._forward(stage, self.transfers.to_device(batch)())()
        return time.perf_counter() - began_s

    def _forward(
        self,
        stage: OptimizedStage,
        batch: Tensor,
        float32_as: torch.dtype = torch.float32,
        allocate: Allocate | None = None,
    ) -> Callable[[], Tensor]:
        with torch.inference_mode():
            return self.transfers.start_to_host(stage(batch), float32_as, allocate)

    def _look_for_lost_device(self) -> None:
        """After any error."""
        self.device_failed = self.device_failed or self._has_lost_device()

    def _has_lost_device(self) -> bool:
        """Whether a GPU fails all calls of this process from now on. The first error may be of CUDA, cuDNN, cuBLAS or the driver."""
        if self.device.type != "cuda":
            return False
        try:
            torch.cuda.synchronize(self.device)
        except Exception:  # noqa: BLE001 - whatever the driver raises
            return True
        return False

    def _prepare(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # per thread; CUDA graphs are recorded on the current device
        os.nice(self._nice)  # on Linux, of this thread only
