"""One stay in one world: take orders and weights, warm up, answer batches, until the world ends."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from config import check_memory
from models import ModelError, Optimized, Tuning
from multiworld import BrokenWorldException, Cause, World, WorldClosedError
from wire import Channel, Kind, Message, StageOrder, TraceContext, WireError, trace_contexts
from workers.engine import Engine
from workers.last_resort import NO_MEMORY_S, end_within, lacks_memory
from workers.metrics import Outcome, WorkerMetrics
from workers.orders import IncomingOrder
from workers.traces import ComputeTraces

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 1 << 30
_COPIES_OF_WEIGHTS = 3
"""At the same time, while a stage is loaded: the pieces, the tensors in them, the stage's own."""
_LAST_WORD_S = 30.0
"""So long a leader has to read that its stage cannot be loaded, and to end the world for it."""
LEADER_RANK = 0


class Session:
    """Holds and serves the stages that one leader orders, in one world.

    Args:
        world: ready, of two, the leader is rank 0.
        on_restart: called when the leader wants this process to end and come back.
    """

    def __init__(
        self,
        world: World,
        engine: Engine,
        on_restart: Callable[[], object] = lambda: None,
        metrics: WorkerMetrics | None = None,
        traces: ComputeTraces | None = None,
    ) -> None:
        self.serving = False
        """True once a stage is loaded and warm."""
        self.out_of_memory = False
        """True once a batch could not be computed for a lack of memory."""
        self.place = engine.place()
        self._world = world
        self._on_restart = on_restart
        self._metrics = metrics or WorkerMetrics()
        self._traces = traces
        self._traced: tuple[int, list[TraceContext]] = (0, [])
        """Whose traces the batch of that number, which comes next, belongs to."""
        self._channel = Channel(world, LEADER_RANK, _MAX_MESSAGE_BYTES)
        self._room = asyncio.Semaphore(1)
        self._incoming: IncomingOrder | None = None
        """Whose weights have not all come yet."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> BrokenWorldException:
        """Serve until the world ends; gives what ended it.

        Raises:
            WorldClosedError: we closed it.
        """
        try:
            await self._serve()
        except BrokenWorldException as ending:
            return ending
        except (WireError, ModelError) as error:
            logger.error("world=%s the leader's orders make no sense: %s", self._world.name, error)  # noqa: TRY400
            self._world.break_(Cause.ABORTED, self._world.rank, str(error))
            return BrokenWorldException(self._world.name, Cause.ABORTED, self._world.rank, str(error))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.place.close()

    async def leave(self) -> None:
        """Tell the leader that we go; it stops sending, and closes the world when everything is answered."""
        await self._channel.send(Message(Kind.LEAVING))

    async def _serve(self) -> NoReturn:
        while True:
            await self._room.acquire()
            message = await self._channel.receive()
            if message.kind is Kind.BATCH:
                traced, self._traced = self._traced, (0, [])
                parents = traced[1] if traced[0] == message.batch else []
                self._start(self._answer(message, parents)).add_done_callback(lambda _: self._room.release())
            else:
                self._room.release()
                self._obey(message)

    def _obey(self, message: Message) -> None:
        match message.kind:
            case Kind.ORDER if self._incoming is None:
                self._incoming = IncomingOrder(message)
            case Kind.WEIGHTS if self._incoming is not None:
                if self._incoming.add(message):
                    order, self._incoming = self._incoming, None
                    self._start(self._fulfil(order))
            case Kind.TRACE:
                self._traced = (message.batch, trace_contexts(message.payload))
            case Kind.DROP:
                logger.info("world=%s version number %d is not wanted any more", self._world.name, message.version)
                self.place.drop(message.version)
            case Kind.RESTART:
                logger.info("world=%s the leader asks for a restart", self._world.name)
                self._on_restart()
            case _:
                raise WireError(f"{message.kind.name} was not to be expected here")

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _fulfil(self, incoming: IncomingOrder) -> None:
        """Load what was ordered, while batches of what is held already go on, and tell the leader what came of it."""
        weights = incoming.take_weights()
        try:
            took_s, made = await self._load(incoming, weights)
        except Exception as error:
            logger.exception("world=%s the stage cannot be loaded", self._world.name)
            await self._fail(incoming, error)
            return
        order, spec = incoming.order, incoming.spec
        self._metrics.stage_loaded(spec.index)
        if not self.serving:
            self.serving = True
            # One more than the leader has in flight: a liar waits in its own link.
            for _ in range(order.window):
                self._room.release()
        self._tell_of(incoming, took_s, made)
        ready = {"warm_up_s": round(took_s, 3), "computes": str(made.recipe), "why": made.why}
        with contextlib.suppress(BrokenWorldException, WorldClosedError):
            await self._channel.send(incoming.reply(Kind.READY, json.dumps(ready)))
        if order.optimize == "compile" and made.recipe.form != "compiled":
            await self._compile(incoming, weights)

    def _tell_of(self, incoming: IncomingOrder, took_s: float, made: Optimized) -> None:
        spec = incoming.spec
        logger.info(
            "world=%s epoch=%d stage=%d/%d model=%s@%s blocks=%s..%s warm after %.2f s computes=%s (%s)",
            *(self._world.name, self._world.epoch, spec.index, spec.num_stages),
            *(spec.model, spec.version, spec.blocks[0], spec.blocks[-1], took_s, made.recipe, made.why),
        )

    async def _compile(self, incoming: IncomingOrder, weights: bytes) -> None:
        """Serve with what was loaded meanwhile, then load again."""
        order, spec = incoming.order, incoming.spec
        if not await self.place.compile(spec, weights, incoming.row_shape, order.max_batch_size, _tuning(order)):
            return
        if not self.place.holds(order.version, spec.index):
            return
        try:
            took_s, made = await self._load(incoming, weights)
        except Exception:
            logger.exception("world=%s stage=%d goes on without its compiled code", self._world.name, spec.index)
        else:
            self._tell_of(incoming, took_s, made)

    async def _load(self, incoming: IncomingOrder, weights: bytes) -> tuple[float, Optimized]:
        order = incoming.order
        if self.serving:  # what it serves must not be lost for what comes on top of it
            check_memory(_COPIES_OF_WEIGHTS * order.weights_bytes)
        return await self.place.load(
            order.version, incoming.spec, weights, incoming.row_shape, order.max_batch_size, _tuning(order)
        )

    async def _fail(self, incoming: IncomingOrder, error: Exception) -> None:
        """Who serves already goes on with what it has; who has nothing else to serve is of no use in this world."""
        with contextlib.suppress(BrokenWorldException, WorldClosedError):
            await self._channel.send(incoming.reply(Kind.FAILED, _describe(error)))
            if not self.serving:
                # Were we the ones to break the world, that could reach the leader before the reason does.
                await asyncio.sleep(_LAST_WORD_S)
                self._world.break_(Cause.ABORTED, self._world.rank, f"the stage cannot be loaded: {_describe(error)}")

    async def _answer(self, message: Message, parents: list[TraceContext]) -> None:
        """Compute one batch, send what came of it, and count it."""
        outcome: Outcome = "unwanted"
        try:
            outcome = await self._compute_and_send(message, parents)
        finally:
            self._metrics.batch_ended(message.stage, outcome)

    async def _compute_and_send(self, message: Message, parents: list[TraceContext]) -> Outcome:
        """What came of the batch; an exception of the stage is an answer too."""
        outcome: Outcome = "answered"
        try:
            if message.payload is None:
                raise WireError("a batch without a payload")
            output, compute_ns, waited_ns = await self.place.compute(message.version, message.stage, message.payload)
            self._metrics.computed(message.stage, compute_ns / 1e9)
            if self._traces is not None and parents:
                images = len(message.payload)
                self._traces.computed(
                    parents, stage=message.stage, images=images, compute_ns=compute_ns, waited_ns=waited_ns
                )
            answer = Message(Kind.RESULT, message.batch, output, compute_ns, waited_ns, message.stage, message.version)
        except Exception as error:
            if lacks_memory(error):  # the leader takes the batch elsewhere; a new process is soon here
                self.out_of_memory = True
                end_within(NO_MEMORY_S)
            logger.exception("world=%s batch=%d stage=%d raised", self._world.name, message.batch, message.stage)
            answer = Message.of_text(
                Kind.FAILED, _describe(error), batch=message.batch, stage=message.stage, version=message.version
            )
            outcome = "failed"
        try:
            await self._channel.send(answer)
        except (BrokenWorldException, WorldClosedError):
            logger.debug("world=%s batch=%d is not wanted any more", self._world.name, message.batch)
            return "unwanted"
        return outcome


def _tuning(order: StageOrder) -> Tuning:
    return Tuning(order.precision, order.optimize, order.tuning_ms / 1e3)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]
