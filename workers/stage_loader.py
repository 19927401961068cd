"""Loads the stages that one leader assigns, or finds them if this worker has loaded them for another leader."""

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from multiworld_serving.common.config import check_memory, release_free_memory
from multiworld_serving.models import BundleStageSpec, Tuning, compiles
from multiworld_serving.workers.compute.engine import Engine, EngineQueue
from multiworld_serving.workers.compute.stage_store import LoadedStage
from multiworld_serving.workers.incoming_assignment import IncomingAssignment

logger = logging.getLogger(__name__)

_COPIES_OF_WEIGHTS = 2
"""Held at once while a stage is loaded: the received bytes, and the stage's parameters. Leaders assume this, too."""


class StageLoader:
    """
    Args:
        queue: the queue of the leader, on which its stages are loaded.
        name: of the leader's world, for the log.
    """

    def __init__(self, engine: Engine, queue: EngineQueue, name: str) -> None:
        self._engine = engine
        self._queue = queue
        self._name = name

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
            stage = LoadedStage(incoming.spec, await self._queue.load(*arguments, incoming.tuning))
            stages.add(digest, stage)
        if compiles(incoming.tuning, stage.optimized.mode):
            self._compile_in_background(stage, *arguments, incoming.tuning)
        return stage, time.monotonic() - began_s

    def _compile_in_background(
        self,
        stage: LoadedStage,
        spec: BundleStageSpec,
        weights: bytearray,
        sample_shape: tuple[int, ...],
        max_batch_size: int,
        tuning: Tuning,
    ) -> None:
        """Compile the stage while it serves. Independent of the leader that assigned it, because others may serve it as well."""
        serving = weakref.ref(stage)

        async def compile_and_replace() -> None:
            queue = self._engine.new_queue()
            try:
                if await queue.compile(spec, weights, sample_shape, max_batch_size, tuning):
                    # Nothing is measured again.
                    final = replace(tuning, optimize="compile")
                    optimized = await queue.load(spec, weights, sample_shape, max_batch_size, final, aside=True)
                    if (found := serving()) is not None:
                        found.optimized = optimized
                        release_free_memory()
                        logger.info("stage=%d execution_mode=%s (%s)", spec.index, optimized.mode, optimized.why)
            except Exception:
                logger.exception("world=%s stage=%d continues without compiled code", self._name, spec.index)
            finally:
                queue.close()

        compiling = stage.compiling = asyncio.create_task(compile_and_replace())
        loop = asyncio.get_running_loop()

        def cancel() -> None:  # the engine's thread may hold the last reference
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(compiling.cancel)

        weakref.finalize(stage, cancel).atexit = False
