"""Serves one leader in one world: receives stages and weights, loads them, and computes batches until the world ends."""

import logging
from collections.abc import Callable
from functools import partial

from multiworld import Cause, World
from multiworld_serving.common.config.process import release_free_memory
from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.wire.inputs import RowsLost, RowsLostError
from multiworld_serving.common.wire.link import Link, LinkLostError
from multiworld_serving.common.wire.protocol import Kind, Received, Reply, WireError, rows_payload
from multiworld_serving.common.wire.work import (
    WORKER_PROTOCOL,
    Batch,
    Computed,
    Failed,
    FetchWeights,
    Leaving,
    Loaded,
    Release,
    Restart,
    StageAssignment,
    Unload,
    Weights,
)
from multiworld_serving.workers.compute.engine import Engine
from multiworld_serving.workers.exit_timer import (
    OUT_OF_MEMORY_EXIT_S,
    arm_exit_timer,
    is_out_of_memory,
)
from multiworld_serving.workers.observability.metrics import Outcome, WorkerMetrics
from multiworld_serving.workers.stage_loader import AssignedStage

logger = logging.getLogger(__name__)

_UNCLAIMED_S = 10.0
"""How long the output of the last stage is kept for frontends that do not fetch it."""
LEADER_RANK = 0


class Session:
    """Loads and serves the stages that one leader assigns, in one world.

    Args:
        world: ready, of size 2; the leader is rank 0.
        edges: of this process.
        on_restart: called when the leader asks this process to exit, so that its supervisor starts it again.
    """

    def __init__(
        self,
        world: World,
        engine: Engine,
        edges: Edges,
        on_restart: Callable[[], object] = lambda: None,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self.serving = False
        """True once a stage is loaded and warmed up."""
        self.device_failed = False
        """True once a batch or a stage failed because the GPU cannot be used by this process any more. The world ends then."""
        self.released = False
        """True once the leader has asked this worker to join another one."""
        self._on_restart = on_restart
        self._stages: dict[tuple[int, int], AssignedStage] = {}
        """Those that the leader has assigned and not unloaded, by version and index."""
        self._engine = engine
        self._metrics = metrics or WorkerMetrics()
        self._edges = edges
        self._link = Link(world, LEADER_RANK, WORKER_PROTOCOL, self._receive)
        self._batches = 0
        """Those that have arrived and have no result yet."""

    async def run(self) -> LinkLostError:
        """Serve until the world ends. Returns why it ended."""
        cause, world = Cause.LEFT, self._link.world
        try:
            lost = await self._link.run()
            cause = lost.cause
            if lost.failed and lost.ending is None:
                logger.error("world=%s the leader sent an %s", world.name, lost)
                world.fail(Cause.ABORTED, world.rank, str(lost))
            return lost
        finally:
            if cause is not Cause.ABORTED:  # otherwise a stage may have failed its self-test
                self._engine.keep(stage.loaded for stage in self._stages.values() if stage.loaded is not None)
            self._stages.clear()
            # Frontends may still fetch the last answers if the leader closed the world on purpose.
            self._edges.store.drop_owner(self, expiring=cause is not Cause.LEFT)
            release_free_memory()

    def leave(self) -> None:
        """Tell the leader that this worker leaves. The leader sends no new batches, and closes the world after the last answer."""
        self._link.send(Leaving())

    def _receive(self, received: Received) -> None:
        """Handle a message of the leader. Raises WireError if the leader may not send it now."""
        name = self._link.world.name
        match received.body:
            case Batch() as batch:
                stage = self._stage(batch)
                most = stage.assignment.window * len(self._stages) + 1  # one is a self-test
                if self._batches >= most:
                    raise WireError(f"a batch while {self._batches} others have no result")
                self._batches += 1
                self._link.handle(received.number, self._answer(batch, stage, received.payload))
            case StageAssignment() as assignment:
                self._link.handle(received.number, self._load(assignment, received.number))
            case Weights() as weights:
                self._stage(weights).add(received.payload)
            case Release(outputs):
                self._edges.store.release(outputs, self)
            case Leaving():
                self.released = True
            case Unload(version):
                logger.info("world=%s unloaded version number %d", name, version)
                self._stages = {key: stage for key, stage in self._stages.items() if key[0] != version}
                release_free_memory()
            case Restart():
                logger.info("world=%s the leader asks for a restart", name)
                self._on_restart()
            case body:
                raise WireError(f"unexpected {type(body).__name__} from a leader")

    def _stage(self, message: Batch | Weights) -> AssignedStage:
        stage = self._stages.get((message.version, message.stage))
        if stage is None:
            what = type(message).__name__
            raise WireError(f"{what} of stage {message.stage}, version {message.version}, which is not assigned")
        return stage

    async def _load(self, assignment: StageAssignment, number: int) -> Loaded:
        """Load a stage. Other stages keep serving meanwhile. If the worker has just joined, the leader ends the world after an error."""
        world = self._link.world
        try:
            stage = AssignedStage(assignment)
            spec = stage.spec
            if stage.key in self._stages:
                raise WireError(f"stage {spec.index} of version {assignment.version} is assigned a second time")
            self._stages[stage.key] = stage
            self._link.max_bytes = max(self._link.max_bytes, stage.max_batch_bytes, assignment.weights_bytes)
            fetch = partial(self._link.reply, number, FetchWeights(), kind=Kind.STEP)
            load_s = await stage.load(self._engine, self, fetch)
        except Exception:
            logger.exception("world=%s the stage cannot be loaded", world.name)
            self._end_if_device_failed()
            raise
        assert stage.loaded is not None, "`load` has returned"
        self._metrics.stage_loaded(spec.index)
        self.serving = True
        how = f"loaded in {load_s:.2f} s" if load_s else "is in memory already"
        logger.info(
            "world=%s generation=%d stage=%d/%d model=%s@%s blocks=%s..%s %s execution_mode=%s",
            *(world.name, world.generation, spec.index, spec.num_stages),
            *(spec.model, spec.version, spec.blocks[0], spec.blocks[-1], how, stage.loaded.optimized),
        )
        release_free_memory()
        return Loaded()

    async def _answer(self, batch: Batch, stage: AssignedStage, payload: memoryview) -> Reply:
        """The result of a batch, or why there is none. Counts the outcome."""
        world = self._link.world
        outcome: Outcome = "discarded"
        try:
            answer = await self._result(batch, stage, payload)
            outcome = "answered"
            return answer
        except RowsLostError as error:
            logger.warning("%s the input is lost: %s", _named(batch, world), error)
            outcome = "input_lost"
            return RowsLost(str(error)), b""
        except Exception as error:
            if is_out_of_memory(error):  # the leader reroutes the batch, and a supervisor starts a new process
                arm_exit_timer(OUT_OF_MEMORY_EXIT_S)
            logger.exception("%s %s the batch raised", _named(batch, world), stage.spec.blocks[0])
            self._end_if_device_failed()
            outcome = "failed"
            return Failed.of(error), b""
        finally:
            self._batches -= 1
            self._metrics.batch_ended(batch.stage, outcome)

    def _end_if_device_failed(self) -> None:
        """End the world after an error if the GPU cannot be used by this process any more."""
        if self._engine.device_failed:
            self.device_failed = True
            world = self._link.world
            world.fail(Cause.ERROR, world.rank, "the GPU has failed for this process")

    async def _result(self, batch: Batch, stage: AssignedStage, payload: memoryview) -> Reply:
        """Compute a batch. The input is dropped on return: it may lie in memory of its producer. Raises RowsLostError."""
        if stage.loaded is None:
            raise WireError(f"stage {batch.stage} of version {batch.version} is not loaded yet")
        inputs = batch.inputs
        row_shape, relayed = stage.input_of(inputs, payload)
        rest = relayed, inputs.relayed_at
        rows = await self._edges.fetch_rows(inputs.sources, inputs.rows, stage.dtype, row_shape, rest)
        allocate = self._edges.allocate if inputs.keep else None
        done = await self._engine.compute(self, stage.loaded, rows, stage.float32_as, allocate)
        self._metrics.computed(batch.stage, done.compute_ns / 1e9)
        output = done.output
        is_last = stage.spec.index + 1 == stage.spec.num_stages
        expires_s = _UNCLAIMED_S if is_last else None
        number = self._edges.store.put(self, output, expires_s=expires_s) if inputs.keep else None
        result = Computed(done.compute_ns, done.waited_us, tuple(output.shape[1:]), number)
        return result, rows_payload(output) if number is None else b""


def _named(batch: Batch, world: World) -> str:
    """A batch, for the log."""
    return f"world={world.name} stage={batch.stage} request_id={batch.request_ids}"
