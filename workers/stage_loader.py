"""Loads the stages that one leader assigns, or finds them if this worker has loaded them for another leader."""

import asyncio
import logging
import time
import weakref
from collections.abc import Awaitable, Callable
from functools import partial

from multiworld_serving.common.config import check_memory, release_free_memory
from multiworld_serving.models.bundle.stage import BundleStageSpec
from multiworld_serving.models.errors import CompileError
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.models.weights.tensor_file import TensorFile
from multiworld_serving.workers.compute.engine import Engine, EngineQueue
from multiworld_serving.workers.compute.stage_store import LoadedStage
from multiworld_serving.workers.incoming_assignment import IncomingAssignment

logger = logging.getLogger(__name__)

_COPIES_OF_WEIGHTS = 2
"""Held at once while a stage is loaded: the received bytes, and the stage's parameters. Leaders assume this, too."""

_compiling: set[asyncio.Task[None]] = set()
"""asyncio itself keeps no reference to tasks."""


class StageLoader:
    """
    Args:
        queue: the queue of the leader, on which its stages are loaded.
    """

    def __init__(self, engine: Engine, queue: EngineQueue) -> None:
        self._engine = engine
        self._queue = queue

    async def obtain(
        self, incoming: IncomingAssignment, fetch: Callable[[], Awaitable[None]]
    ) -> tuple[LoadedStage, float]:
        """The assigned stage, and the seconds that loading took. Other sessions serve it too from then on.

        Args:
            fetch: asks the leader for the weights. Not called if the stage is in memory.
        Raises:
            MemoryError: there is not enough memory next to the stages that are loaded.
            ModelError, RuntimeError: the weights are not those announced, do not match the stage, or the
                device cannot run it.
        """
        stages, digest = self._engine.stages, incoming.assignment.digest
        async with stages.turn(digest):
            if (stage := stages.find(digest)) is not None:
                return stage, 0.0
            if len(stages):  # the kernel's OOM killer would end the stages that serve as well
                check_memory(_COPIES_OF_WEIGHTS * incoming.assignment.weights_bytes)
            await fetch()
            weights = await incoming.take_weights()
            began_s = time.monotonic()
            await self._engine.run(self._queue, partial(incoming.check_weights, weights))
            arguments = incoming.spec, weights, incoming.sample_shape, incoming.assignment.max_batch_size
            stage = await self._queue.load(*arguments, incoming.tuning)
            stages.add(digest, stage)
        if incoming.tuning.optimize == "compile":
            self._compile_in_background(stage, *arguments, incoming.tuning)
        return stage, time.monotonic() - began_s

    def _compile_in_background(
        self,
        stage: LoadedStage,
        spec: BundleStageSpec,
        weights: TensorFile,
        sample_shape: tuple[int, ...],
        max_batch_size: int,
        tuning: Tuning,
    ) -> None:
        """Compile the stage while it serves. Independent of the leader that assigned it, because others may serve it as well."""
        serving, index = weakref.ref(stage), spec.index
        queue = self._engine.new_queue()

        async def compile_and_replace() -> None:
            try:
                made = await queue.compile(
                    spec, weights, sample_shape, max_batch_size, tuning, lambda: serving() is not None
                )
                found = serving()
                if made is not None and found is not None:
                    found.become(made)
                    logger.info("stage=%d execution_mode=%s (%s)", index, made.optimized.mode, made.optimized.why)
            except (CompileError, MemoryError) as error:
                logger.warning("stage=%d stays as with --optimize fused, it cannot be compiled: %s", index, error)
            except Exception:
                logger.exception("stage=%d stays as with --optimize fused, it cannot be compiled", index)
            finally:
                queue.close()
                release_free_memory()

        task = asyncio.create_task(compile_and_replace())
        _compiling.add(task)
        task.add_done_callback(_compiling.discard)
