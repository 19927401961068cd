"""Loads the stages that one leader assigns, or finds them if this worker has loaded them for another leader."""

import asyncio
import hashlib
import logging
import time
import weakref
from collections.abc import Awaitable, Callable

from multiworld_serving.common.config import check_memory, release_free_memory
from multiworld_serving.common.wire.join import StageAssignment
from multiworld_serving.common.wire.message import Message, MessageKind, WireError
from multiworld_serving.models.bundle.stage import BundleStageSpec
from multiworld_serving.models.errors import CompileError, StageError
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.models.weights.tensor_file import TensorFile
from multiworld_serving.workers.compute.engine import Engine, EngineQueue
from multiworld_serving.workers.compute.stage_store import LoadedStage, StageTask

logger = logging.getLogger(__name__)

_COPIES_OF_WEIGHTS = 2
"""Held at once while a stage is loaded: the received bytes, and the stage's parameters. Leaders assume this, too."""

_compiling: set[asyncio.Task[None]] = set()
"""asyncio itself keeps no reference to tasks."""


class IncomingAssignment:
    """A stage assignment as it arrives: its description, then its weights in chunks.

    Args:
        message: the ASSIGN message. WEIGHTS messages follow after FETCH_WEIGHTS.

    Attributes:
        task: what to load. Its weights arrive with `add`.
        is_fetching: whether FETCH_WEIGHTS was sent.
        complete: set when all weights have arrived.
    Raises:
        WireError, models.StageError: the message is invalid.
    """

    def __init__(self, message: Message) -> None:
        self.assignment = StageAssignment.from_json(message.text())
        self.spec = BundleStageSpec.from_json(self.assignment.spec)
        self.task = StageTask(
            self.spec,
            TensorFile.in_memory(),
            self.assignment.max_batch_size,
            Tuning(self.assignment.precision, self.assignment.optimize),
        )
        self.is_fetching = False
        self._arrived = 0
        self.complete = asyncio.Event()

    @property
    def missing_bytes(self) -> int:
        """Bytes of weights that have not arrived yet."""
        return self.assignment.weights_bytes - self._arrived

    def add(self, message: Message) -> None:
        """Append a chunk of weights. Raises WireError for more bytes than announced."""
        announced = self.assignment.weights_bytes
        size = 0 if message.payload is None else message.payload.nbytes
        if message.payload is None or size > self.missing_bytes:
            raise WireError(f"WEIGHTS: {self._arrived + size} bytes; expected {announced}")
        self.task.weights.write(message.payload.numpy().data, self._arrived)
        self._arrived += size
        if not self.missing_bytes:
            self.complete.set()

    def check_weights(self) -> None:
        """Raise StageError for other weights than announced. Blocks for up to a second."""
        with open(f"/proc/self/fd/{self.task.weights.fileno()}", "rb") as file:
            found, announced = hashlib.file_digest(file, "sha256").hexdigest(), self.assignment.weights_sha256
        if found != announced:
            raise StageError(f"the weights have the SHA-256 hash {found}, but {announced} was announced")

    def message(self, kind: MessageKind) -> Message:
        """A message to the leader about this assignment, without a payload."""
        return Message(kind, stage=self.spec.index, version=self.assignment.version)

    def reply(self, kind: MessageKind, text: str) -> Message:
        """A message to the leader about this assignment."""
        return Message.from_text(kind, text, stage=self.spec.index, version=self.assignment.version)


async def obtain_stage(
    engine: Engine, queue: EngineQueue, incoming: IncomingAssignment, fetch: Callable[[], Awaitable[None]]
) -> tuple[LoadedStage, float]:
    """The assigned stage, and the seconds that loading took. Other sessions serve it too from then on.

    Args:
        queue: of the leader, on which its stages are loaded.
        fetch: asks the leader for the weights. Not called if the stage is in memory.
    Raises:
        MemoryError: there is not enough memory next to the stages that are loaded.
        ModelError, RuntimeError: the weights are not those announced, do not match the stage, or the
            device cannot run it.
    """
    stages, digest, task = engine.stages, incoming.assignment.digest, incoming.task
    async with stages.turn(digest):
        if (stage := stages.find(digest)) is not None:
            return stage, 0.0
        if len(stages):  # the kernel's OOM killer would end the stages that serve as well
            check_memory(_COPIES_OF_WEIGHTS * incoming.assignment.weights_bytes)
        await fetch()
        await incoming.complete.wait()
        began_s = time.monotonic()
        await engine.run(queue, incoming.check_weights)
        stage = await queue.load(task)
        stages.add(digest, stage)
    if task.tuning.optimize == "compile":
        compiling = asyncio.create_task(_compile_and_replace(engine, weakref.ref(stage), task))
        _compiling.add(compiling)
        compiling.add_done_callback(_compiling.discard)
    return stage, time.monotonic() - began_s


async def _compile_and_replace(engine: Engine, serving: "weakref.ref[LoadedStage]", task: StageTask) -> None:
    """Compile a stage while it serves. Independent of the leader that assigned it, because others may serve it as well."""
    index, queue = task.spec.index, engine.new_queue()
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
        release_free_memory()
