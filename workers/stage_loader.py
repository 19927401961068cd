"""Loads the stages that one leader assigns, or finds them if this worker has loaded them for another leader."""

import asyncio
import logging
import time
import weakref
from collections.abc import Awaitable, Callable

from multiworld_serving.common.config import check_memory, release_free_memory
from multiworld_serving.models.errors import CompileError
from multiworld_serving.workers.compute.engine import Engine, EngineQueue
from multiworld_serving.workers.compute.stage_store import LoadedStage, StageTask
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
        stages, digest, task = self._engine.stages, incoming.assignment.digest, incoming.task
        async with stages.turn(digest):
            if (stage := stages.find(digest)) is not None:
                return stage, 0.0
            if len(stages):  # the kernel's OOM killer would end the stages that serve as well
                check_memory(_COPIES_OF_WEIGHTS * incoming.assignment.weights_bytes)
            await fetch()
            await incoming.complete.wait()
            began_s = time.monotonic()
            await self._engine.run(self._queue, incoming.check_weights)
            stage = await self._queue.load(task)
            stages.add(digest, stage)
        if task.tuning.optimize == "compile":
            compiling = asyncio.create_task(self._compile_and_replace(weakref.ref(stage), task))
            _compiling.add(compiling)
            compiling.add_done_callback(_compiling.discard)
        return stage, time.monotonic() - began_s

    async def _compile_and_replace(self, serving: "weakref.ref[LoadedStage]", task: StageTask) -> None:
        """Compile a stage while it serves. Independent of the leader that assigned it, because others may serve it as well."""
        index, queue = task.spec.index, self._engine.new_queue()
        try:
            made = await queue.compile(task, lambda: serving() is not None)
            found = serving()
            if made is not None and found is not None:
                found.optimized, found.threads = made.optimized, made.threads
                logger.info("stage=%d execution_mode=%s (%s)", index, made.optimized.mode, made.optimized.why)
        except (CompileError, MemoryError) as error:
            logger.warning("stage=%d stays as with --optimize fused, it cannot be compiled: %s", index, error)
        except Exception:
            logger.exception("stage=%d stays as with --optimize fused, it cannot be compiled", index)
        finally:
            queue.close()
            release_free_memory()
