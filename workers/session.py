"""Serves one leader in one world: receives stages and weights, loads them, and computes batches until the world ends."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NoReturn

import torch

from multiworld import BrokenWorldException, Cause, World, WorldClosedError
from multiworld.texts import one_line
from multiworld_serving.common.config.process import release_free_memory
from multiworld_serving.common.edges.edge import RowsLostError
from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.inputs import MAX_RELEASED, BatchInputs, LostInput
from multiworld_serving.common.wire.message import Message, MessageKind, WireError
from multiworld_serving.models.errors import ModelError
from multiworld_serving.workers.compute.engine import Engine
from multiworld_serving.workers.exit_timer import (
    OUT_OF_MEMORY_EXIT_S,
    arm_exit_timer,
    is_out_of_memory,
)
from multiworld_serving.workers.leader_order import LeaderOrder, LeaderPlace
from multiworld_serving.workers.observability.metrics import Outcome, WorkerMetrics
from multiworld_serving.workers.stage_loader import AssignedStage

logger = logging.getLogger(__name__)

_REPORT_S = 1.0
"""How often this worker looks whether it obeys another leader now."""
LEADER_RANK = 0
_OUTCOMES: dict[MessageKind, Outcome] = {MessageKind.FAILED: "failed", MessageKind.INPUT_LOST: "input_lost"}
"""Of batches without a result, by what the leader is told."""


class Session:
    """Loads and serves the stages that one leader assigns, in one world.

    Args:
        world: ready, of size 2; the leader is rank 0.
        edges: of this process.
        on_restart: called when the leader asks this process to exit, so that its supervisor starts it again.
        place: of the leader among all leaders; None: it is the only one.
    """

    def __init__(
        self,
        world: World,
        engine: Engine,
        edges: Edges,
        on_restart: Callable[[], object] = lambda: None,
        metrics: WorkerMetrics | None = None,
        place: LeaderPlace | None = None,
    ) -> None:
        self.serving = False
        """True once a stage is loaded and warmed up."""
        self.device_failed = False
        """True once a batch failed because the GPU cannot be used by this process any more. The world ends then."""
        self._world = world
        self._on_restart = on_restart
        self._place = place or LeaderPlace(LeaderOrder(), 0, "")
        self._place.leave = lambda: self._start(self.leave())
        self._engine = engine
        self._metrics = metrics or WorkerMetrics()
        self._edges = edges
        self._channel = Channel(world, LEADER_RANK, self._check)
        self._slots = asyncio.Semaphore(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> BrokenWorldException:
        """Serve until the world ends. Returns the exception that ended it.

        Raises:
            WorldClosedError: this process closed the world.
        """
        left = False
        self._start(self._report())
        try:
            await self._serve()
        except BrokenWorldException as ending:
            left = ending.cause is Cause.LEFT
            return ending
        except (WireError, ModelError) as error:
            logger.error("world=%s the leader sent an invalid message: %s", self._world.name, error)  # noqa: TRY400
            self._world.fail(Cause.ABORTED, self._world.rank, str(error))
            return BrokenWorldException(self._world.name, Cause.ABORTED, self._world.rank, str(error))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._place.stages.clear()
            # Frontends may still fetch the last answers if the leader closed the world on purpose.
            self._edges.store.drop_owner(self, expiring=not left)
            release_free_memory()

    async def leave(self) -> None:
        """Tell the leader that this worker leaves. The leader sends no new batches, and closes the world after the last answer."""
        await self._tell(Message(MessageKind.LEAVING))

    async def _tell(self, message: Message) -> None:
        """Send a message, if the world has not ended."""
        with contextlib.suppress(BrokenWorldException, WorldClosedError):
            await self._channel.send(message)

    async def _serve(self) -> NoReturn:
        while True:
            await self._slots.acquire()
            message = await self._channel.receive()
            if message.kind in (MessageKind.BATCH, MessageKind.INPUTS):
                self._start(self._answer(message))
            else:
                self._slots.release()
                self._handle(message)

    async def _report(self) -> None:
        """Tell the leader which leader this worker obeys."""
        obeyed: str | None = None
        while True:
            await asyncio.sleep(_REPORT_S)
            if obeyed != self._place.obeyed:
                obeyed = self._place.obeyed
                await self._tell(Message.from_text(MessageKind.OBEYS, obeyed))

    def _check(self, message: Message) -> None:
        """Reject a message that the leader may not send now; see `Channel`. Raises WireError."""
        match message.kind:
            case MessageKind.BATCH:
                stage = self._stage(message)
                message.require_batch(stage.dtype, stage.row_shape, 1, stage.assignment.max_batch_size)
            case MessageKind.INPUTS:
                message.require_batch(torch.uint8, (), 1, self._stage(message).max_inputs_bytes)
            case MessageKind.RELEASE:
                message.require_batch(torch.int64, (), 1, MAX_RELEASED)
            case MessageKind.ASSIGN | MessageKind.UNABLE:
                message.require_text()
            case MessageKind.WEIGHTS:
                message.require_batch(torch.uint8, (), 1, self._stage(message).missing_bytes)
            case MessageKind.UNLOAD | MessageKind.RESTART:
                message.require_no_payload()
            case _:
                raise WireError(f"{message.kind.name} was not expected here")

    def _stage(self, message: Message) -> AssignedStage:
        stage = self._place.stages.get((message.version, message.stage))
        if stage is None:
            raise WireError(
                f"{message.kind.name} of stage {message.stage}, version {message.version}, which is not assigned"
            )
        return stage

    def _handle(self, message: Message) -> None:
        """Handle a message that `_check` has accepted."""
        match message.kind, message.payload:
            case MessageKind.ASSIGN, _:
                self._assign(AssignedStage(message))
            case MessageKind.WEIGHTS, torch.Tensor() as chunk:
                self._stage(message).add(chunk)
            case MessageKind.RELEASE, torch.Tensor() as outputs:
                self._edges.store.release(outputs.tolist(), self)
            case MessageKind.UNABLE, _:
                self._place.unable = bool(why := message.reason())
                logger.info("world=%s leader=%s %s", self._world.name, self._place.name, why or "can serve again")
            case MessageKind.UNLOAD, _:
                logger.info("world=%s unloaded version number %d", self._world.name, message.version)
                self._place.unloaded(message.version)
                release_free_memory()
            case MessageKind.RESTART, _:
                logger.info("world=%s the leader asks for a restart", self._world.name)
                self._on_restart()

    def _assign(self, stage: AssignedStage) -> None:
        if stage.key in self._place.stages:
            raise WireError(f"ASSIGN of stage {stage.spec.index}, version {stage.assignment.version}, a second time")
        if not self._place.accepts(stage.digest):
            text = f"it obeys leader {self._place.obeyed}, which has not assigned this version of the stage with equal settings"
            logger.info("world=%s stage=%d refused: %s", self._world.name, stage.spec.index, text)
            self._start(self._tell(stage.reply(MessageKind.REFUSED, text)))
            return
        self._place.assigned(stage)
        self._start(self._load(stage))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, stage: AssignedStage) -> None:
        """Load a stage and report the outcome to the leader. Other stages keep serving meanwhile."""
        try:
            load_s = await stage.load(
                self._engine, self, partial(self._channel.send, stage.reply(MessageKind.FETCH_WEIGHTS))
            )
        except (BrokenWorldException, WorldClosedError):
            return
        except Exception as error:
            logger.exception("world=%s the stage cannot be loaded", self._world.name)
            # If the worker has just joined, the leader ends the world.
            await self._tell(stage.reply(MessageKind.FAILED, _describe(error)))
            return
        assert stage.loaded is not None, "`load` has returned"
        spec, made = stage.spec, stage.loaded.optimized
        self._metrics.stage_loaded(spec.index)
        self._place.loaded()
        if not self.serving:
            self.serving = True
            # One more slot than the leader's window: a leader that exceeds its window blocks only its own link.
            for _ in range(stage.assignment.window):
                self._slots.release()
        how = f"loaded in {load_s:.2f} s" if load_s else "is in memory already"
        logger.info(
            "world=%s generation=%d stage=%d/%d model=%s@%s blocks=%s..%s %s execution_mode=%s (%s)",
            *(self._world.name, self._world.generation, spec.index, spec.num_stages),
            *(spec.model, spec.version, spec.blocks[0], spec.blocks[-1], how, made.mode, made.why),
        )
        release_free_memory()
        await self._tell(stage.reply(MessageKind.READY))

    async def _answer(self, message: Message) -> None:
        """Compute a batch and send RESULT or KEPT, FAILED when the stage raises, or INPUT_LOST. Counts the outcome."""
        outcome: Outcome = "discarded"
        try:
            answer = await self._compute(message)
            await self._channel.send(answer)
            outcome = _OUTCOMES.get(answer.kind, "answered")
            if self.device_failed:
                self._world.fail(Cause.ERROR, self._world.rank, "the GPU has failed for this process")
        except (BrokenWorldException, WorldClosedError):
            logger.debug("world=%s batch=%d discarded: the world ended", self._world.name, message.batch)
        finally:
            self._metrics.batch_ended(message.stage, outcome)
            self._slots.release()

    async def _compute(self, message: Message) -> Message:
        """The result of a batch, or why there is none."""
        try:
            return await self._result(message)
        except RowsLostError as error:
            logger.warning("world=%s batch=%d stage=%d: %s", self._world.name, message.batch, message.stage, error)
            lost = LostInput(error.holders, error.unreachable, str(error))
            return message.reply(MessageKind.INPUT_LOST, lost.to_json())
        except Exception as error:
            if is_out_of_memory(error):  # the leader reroutes the batch, and a supervisor starts a new process
                arm_exit_timer(OUT_OF_MEMORY_EXIT_S)
            self.device_failed |= await self._engine.has_failed(self, error)
            logger.exception("world=%s batch=%d stage=%d raised", self._world.name, message.batch, message.stage)
            return message.reply(MessageKind.FAILED, _describe(error))

    async def _result(self, message: Message) -> Message:
        """Compute a batch; returns RESULT or KEPT. The input is dropped on return: it may lie in memory of its producer."""
        stage = self._stage(message)
        if stage.loaded is None:
            raise WireError(f"stage {message.stage} of version {message.version} is not loaded yet")
        inputs, batch = await self._input_of(message, stage)
        allocate = self._edges.allocate if inputs is not None and inputs.keep else None
        done = await self._engine.compute(self, stage.loaded, batch, stage.float32_as, allocate)
        output, compute_ns, waited_us = done.output, done.compute_ns, done.waited_us
        self._metrics.computed(message.stage, compute_ns / 1e9)
        kind = MessageKind.RESULT
        if inputs is not None and inputs.keep:
            number = self._edges.store.put(self, output, expires_s=inputs.expires_s or None)
            if number is not None:  # else it is sent to the leader
                kind, output = MessageKind.KEPT, torch.tensor([number, *output.shape[1:]])
        return Message(kind, message.batch, output, compute_ns, waited_us, message.stage, message.version)

    async def _input_of(self, message: Message, stage: AssignedStage) -> tuple[BatchInputs | None, torch.Tensor]:
        """The input of a batch, fetched if it is not in the message; and for INPUTS the description. Raises RowsLostError."""
        assert message.payload is not None, "`_check` requires a payload"
        if message.kind is MessageKind.BATCH:
            return None, message.payload
        inputs = BatchInputs.parse(message.payload, stage.dtype, stage.row_shape.dims, stage.assignment.max_batch_size)
        row_shape = inputs.row_shape(stage.row_shape.dims)
        if not stage.row_shape.accepts(row_shape):
            raise WireError(f"INPUTS with rows of {row_shape}; expected {stage.row_shape}")
        self._edges.store.release(inputs.release, self)
        rest = inputs.relayed, inputs.relayed_at
        return inputs, await self._edges.fetch_rows(inputs.sources, inputs.rows, stage.dtype, row_shape, rest)


def _describe(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")
