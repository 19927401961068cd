"""Serves one leader in one world: receives stages and weights, loads them, and computes batches until the world ends."""

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, NoReturn

import torch

from multiworld import BrokenWorldException, Cause, World, WorldClosedError
from multiworld.texts import shown
from multiworld_serving.common.config import release_free_memory
from multiworld_serving.common.edges.edge import RowsLostError
from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.inputs import MAX_INPUTS_HEAD_BYTES, MAX_RELEASED, BatchInputs, LostInput
from multiworld_serving.common.wire.message import Header, Message, MessageKind, RowShape, WireError
from multiworld_serving.models.errors import ModelError
from multiworld_serving.workers.compute.engine import Engine
from multiworld_serving.workers.exit_timer import (
    OUT_OF_MEMORY_EXIT_S,
    arm_exit_timer,
    is_device_failure,
    is_out_of_memory,
)
from multiworld_serving.workers.leader_order import LeaderOrder, LeaderPlace
from multiworld_serving.workers.observability.metrics import Outcome, WorkerMetrics
from multiworld_serving.workers.stage_loader import IncomingAssignment, obtain_stage

logger = logging.getLogger(__name__)

_REPORT_S = 1.0
"""How often this worker looks whether it obeys another leader now."""
_FAILURE_GRACE_S = 30.0
"""After reporting that the stage cannot be loaded, how long to wait for the leader to end the world."""
LEADER_RANK = 0
_OUTCOMES: dict[MessageKind, Outcome] = {MessageKind.FAILED: "failed", MessageKind.INPUT_LOST: "input_lost"}
"""Of batches without a result, by what the leader is told."""


class _Expected(NamedTuple):
    """What an assigned stage accepts and returns. The first fields are in the order of `Header.require_batch`'s parameters.

    Attributes:
        float32_as: as which a float32 output travels.
    """

    dtype: torch.dtype
    row_shape: RowShape
    min_batch_size: int
    max_batch_size: int
    float32_as: torch.dtype

    @property
    def max_inputs_bytes(self) -> int:
        """Most bytes of an INPUTS message for this stage."""
        row_bytes = math.prod(self.row_shape.dims) * self.dtype.itemsize
        return MAX_INPUTS_HEAD_BYTES + self.max_batch_size * row_bytes


class Session:
    """Loads and serves the stages that one leader assigns, in one world.

    Args:
        world: ready, of size 2; the leader is rank 0.
        on_restart: called when the leader asks this process to exit, so that its supervisor starts it again.
        place: of the leader among all leaders; None: it is the only one.
        edges: of this process; None: all tensors go through the leader.
    """

    def __init__(
        self,
        world: World,
        engine: Engine,
        on_restart: Callable[[], object] = lambda: None,
        metrics: WorkerMetrics | None = None,
        place: LeaderPlace | None = None,
        edges: Edges | None = None,
    ) -> None:
        self.serving = False
        """True once a stage is loaded and warmed up."""
        self.device_failed = False
        """True once a batch failed because the GPU cannot be used by this process any more. The world ends then."""
        self.queue = engine.new_queue()
        self._world = world
        self._on_restart = on_restart
        self._place = place or LeaderPlace(LeaderOrder(), 0, "")
        self._place.leave = lambda: self._start(self.leave())
        self._engine = engine
        self._metrics = metrics or WorkerMetrics()
        self._edges = edges
        self._channel = Channel(world, LEADER_RANK, self._check)
        self._slots = asyncio.Semaphore(1)
        self._incoming: IncomingAssignment | None = None
        """The assignment whose stage is not loaded yet, and whose weights have not all arrived."""
        self._inputs: dict[tuple[int, int], _Expected] = {}
        """By version and stage: the stages that are assigned and not unloaded."""
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
            self.queue.close()
            if self._edges is not None:
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

    def _check(self, header: Header) -> None:
        """Reject a header that the leader may not send now; see `Channel`. Raises WireError."""
        match header.kind:
            case MessageKind.BATCH:
                header.require_batch(*self._expected(header)[:4])
            case MessageKind.INPUTS if self._edges is not None:
                header.require_batch(torch.uint8, (), 1, self._expected(header).max_inputs_bytes)
            case MessageKind.RELEASE if self._edges is not None:
                header.require_batch(torch.int64, (), 1, MAX_RELEASED)
            case MessageKind.ASSIGN if self._incoming is None:
                header.require_text()
            case MessageKind.WEIGHTS if self._incoming is not None and self._incoming.is_fetching:
                header.require_batch(torch.uint8, (), 1, self._incoming.missing_bytes)
            case MessageKind.UNLOAD | MessageKind.RESTART:
                header.require_no_payload()
            case _:
                raise WireError(f"{header.kind.name} was not expected here")

    def _expected(self, message: Header | Message) -> _Expected:
        expected = self._inputs.get((message.version, message.stage))
        if expected is None:
            raise WireError(
                f"{message.kind.name} of stage {message.stage}, version {message.version}, which is not assigned"
            )
        return expected

    def _handle(self, message: Message) -> None:
        match message.kind:
            case MessageKind.ASSIGN if self._incoming is None:
                incoming = IncomingAssignment(message)
                spec, shape, most = incoming.spec, incoming.assignment.sample_shape, incoming.task.max_batch_size
                if not self._place.accepts(incoming.assignment.digest):
                    self._start(self._refuse(incoming))
                    return
                self._incoming = incoming
                self._inputs[incoming.assignment.version, spec.index] = _Expected(
                    spec.input_rows.dtype if spec.is_first else incoming.assignment.travels_as(spec.input_rows.dtype),
                    *(RowShape(shape, spec.input_rows.varies), 1, most),
                    torch.float32 if spec.is_last else incoming.assignment.travels_as(torch.float32),
                )
                self._place.assigned(incoming.assignment.version, spec, incoming.assignment.digest)
                self._start(self._serve_assignment(incoming))
            case MessageKind.WEIGHTS if self._incoming is not None:
                self._incoming.add(message)
                if self._incoming.complete.is_set():
                    self._incoming = None
            case MessageKind.RELEASE if self._edges is not None and message.payload is not None:
                self._edges.store.release(message.payload.tolist(), self)
            case MessageKind.UNLOAD:
                logger.info("world=%s unloaded version number %d", self._world.name, message.version)
                self.queue.unload(message.version)
                self._place.unloaded(message.version)
                self._inputs = {key: expected for key, expected in self._inputs.items() if key[0] != message.version}
                release_free_memory()
            case MessageKind.RESTART:
                logger.info("world=%s the leader asks for a restart", self._world.name)
                self._on_restart()
            case _:
                raise WireError(f"{message.kind.name} was not expected here")

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve_assignment(self, incoming: IncomingAssignment) -> None:
        """Load a stage and report the outcome to the leader. Other stages keep serving meanwhile."""

        async def fetch() -> None:
            incoming.is_fetching = True
            await self._channel.send(incoming.message(MessageKind.FETCH_WEIGHTS))

        try:
            stage, load_s = await obtain_stage(self._engine, self.queue, incoming, fetch)
        except (BrokenWorldException, WorldClosedError):
            return
        except Exception as error:
            logger.exception("world=%s the stage cannot be loaded", self._world.name)
            await self._fail(incoming, error)
            return
        finally:
            if self._incoming is incoming:
                self._incoming = None
        version, spec, made = incoming.assignment.version, incoming.spec, stage.optimized
        if (version, spec.index) in self._inputs:  # else it was unloaded meanwhile
            self.queue.serve(version, stage)
        self._metrics.stage_loaded(spec.index)
        self._place.loaded()
        if not self.serving:
            self.serving = True
            # One more slot than the leader's window: a leader that exceeds its window blocks only its own link.
            for _ in range(incoming.assignment.window):
                self._slots.release()
        how = f"loaded in {load_s:.2f} s" if load_s else "is in memory already"
        logger.info(
            "world=%s generation=%d stage=%d/%d model=%s@%s blocks=%s..%s %s execution_mode=%s (%s)",
            *(self._world.name, self._world.generation, spec.index, spec.num_stages),
            *(spec.model, spec.version, spec.blocks[0], spec.blocks[-1], how, made.mode, made.why),
        )
        release_free_memory()
        ready = {"warm_up_s": round(load_s, 3), "execution_mode": str(made.mode), "why": made.why}
        await self._tell(incoming.reply(MessageKind.READY, json.dumps(ready)))

    async def _refuse(self, incoming: IncomingAssignment) -> None:
        text = f"it obeys leader {self._place.obeyed}, which has not assigned this version of the stage with equal settings"
        logger.info("world=%s stage=%d refused: %s", self._world.name, incoming.spec.index, text)
        await self._tell(incoming.reply(MessageKind.REFUSED, text))

    async def _fail(self, incoming: IncomingAssignment, error: Exception) -> None:
        """Report that a stage cannot be loaded. Without another stage to serve, the world ends."""
        await self._tell(incoming.reply(MessageKind.FAILED, _describe(error)))
        if not self.serving:
            # The leader ends the world after reading the reason. Breaking it here at once could overtake that message.
            await asyncio.sleep(_FAILURE_GRACE_S)
            self._world.fail(Cause.ABORTED, self._world.rank, f"the stage cannot be loaded: {_describe(error)}")

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
            return lost.message(message.batch, message.stage, message.version)
        except Exception as error:
            if is_out_of_memory(error):  # the leader reroutes the batch, and a supervisor starts a new process
                arm_exit_timer(OUT_OF_MEMORY_EXIT_S)
            self.device_failed |= is_device_failure(error)
            logger.exception("world=%s batch=%d stage=%d raised", self._world.name, message.batch, message.stage)
            return Message.from_text(
                MessageKind.FAILED, _describe(error), batch=message.batch, stage=message.stage, version=message.version
            )

    async def _result(self, message: Message) -> Message:
        """Compute a batch; returns RESULT or KEPT. The input is dropped on return: it may lie in memory of its producer."""
        inputs, batch = await self._input_of(message)
        edges = self._edges if inputs is not None and inputs.keep else None
        done = await self.queue.compute(
            *(message.version, message.stage, batch, self._expected(message).float32_as),
            edges.allocate if edges is not None else None,
        )
        output, compute_ns, waited_us = done.output, done.compute_ns, done.waited_us
        self._metrics.computed(message.stage, compute_ns / 1e9)
        kind = MessageKind.RESULT
        if edges is not None and inputs is not None:
            number = edges.store.put(self, output, expires_s=inputs.expires_s or None)
            if number is not None:  # else it is sent to the leader
                kind, output = MessageKind.KEPT, torch.tensor([number, *output.shape[1:]])
        return Message(kind, message.batch, output, compute_ns, waited_us, message.stage, message.version)

    async def _input_of(self, message: Message) -> tuple[BatchInputs | None, torch.Tensor]:
        """The input of a batch, fetched if it is not in the message; and for INPUTS the description. Raises RowsLostError."""
        assert message.payload is not None, "`_check` requires a payload"
        if message.kind is MessageKind.BATCH:
            return None, message.payload
        assert self._edges is not None, "`_check` requires edges"
        expected = self._expected(message)
        inputs = BatchInputs.parse(message.payload, expected.dtype, expected.row_shape.dims, expected.max_batch_size)
        row_shape = inputs.row_shape(expected.row_shape.dims)
        if not expected.row_shape.accepts(row_shape):
            raise WireError(f"INPUTS with rows of {row_shape}; expected {expected.row_shape}")
        self._edges.store.release(inputs.release, self)
        rest = inputs.relayed, inputs.relayed_at
        return inputs, await self._edges.fetch_rows(inputs.sources, inputs.rows, expected.dtype, row_shape, rest)


def _describe(error: Exception) -> str:
    return shown(f"{type(error).__name__}: {error}")
