"""One stay in one world: take orders and weights, warm up, answer batches, until the world ends."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from typing import NoReturn

from models import ModelError, Optimized, StageSpec, Tuning
from multiworld import BrokenWorldException, Cause, World, WorldClosedError
from wire import Channel, Kind, Message, StageOrder, WireError
from workers.engine import Engine
from workers.metrics import Outcome, WorkerMetrics

logger = logging.getLogger(__name__)

_MAX_WEIGHTS_BYTES = 4 << 30
_MAX_MESSAGE_BYTES = 1 << 30
_LAST_WORD_S = 5.0
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
    ) -> None:
        self.serving = False
        """True once a stage is loaded and warm."""
        self.place = engine.place()
        self._world = world
        self._on_restart = on_restart
        self._metrics = metrics or WorkerMetrics()
        self._channel = Channel(world, LEADER_RANK, _MAX_MESSAGE_BYTES)
        self._room = asyncio.Semaphore(1)
        self._answers: set[asyncio.Task[None]] = set()

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
            for task in self._answers:
                task.cancel()
            await asyncio.gather(*self._answers, return_exceptions=True)
            self.place.close()

    async def leave(self) -> None:
        """Tell the leader that we go; it stops sending, and closes the world when everything is answered."""
        await self._channel.send(Message(Kind.LEAVING))

    async def _serve(self) -> NoReturn:
        await self._take_order(await self._channel.receive())
        while True:
            await self._room.acquire()
            message = await self._channel.receive()
            if message.kind is Kind.BATCH:
                task = asyncio.create_task(self._answer(message))
                self._answers.add(task)
                task.add_done_callback(self._answers.discard)
                task.add_done_callback(lambda _: self._room.release())
                continue
            self._room.release()
            if message.kind is Kind.RESTART:
                logger.info("world=%s the leader asks for a restart", self._world.name)
                self._on_restart()
            else:
                await self._take_order(message)

    async def _take_order(self, message: Message) -> None:
        if message.kind is not Kind.ORDER:
            raise WireError(f"expected an order, got {message.kind.name}")
        order = StageOrder.from_json(message.text())
        spec = StageSpec.from_json(order.spec)
        weights = await self._receive_weights(order.weights_bytes)
        took_s, made = await self._load(order, spec, weights)
        self._metrics.stage_loaded(spec.index)
        if not self.serving:
            self.serving = True
            # One more than the leader has in flight: a liar waits in its own link.
            for _ in range(order.window):
                self._room.release()
        logger.info(
            "world=%s epoch=%d stage=%d/%d model=%s@%s blocks=%s..%s warm after %.2f s computes=%s (%s)",
            *(self._world.name, self._world.epoch, spec.index, spec.num_stages),
            *(spec.model, spec.version, spec.blocks[0], spec.blocks[-1], took_s, made.recipe, made.why),
        )
        ready = {"warm_up_s": round(took_s, 3), "computes": str(made.recipe), "why": made.why}
        await self._channel.send(Message.of_text(Kind.READY, json.dumps(ready)))

    async def _load(self, order: StageOrder, spec: StageSpec, weights: bytes) -> tuple[float, Optimized]:
        try:
            tuning = Tuning(order.precision, order.optimize, order.tuning_ms / 1e3)
            return await self.place.load(spec, weights, order.row_shape, order.max_batch_size, tuning)
        except Exception as error:
            logger.exception("world=%s the stage cannot be loaded", self._world.name)
            await self._channel.send(Message.of_text(Kind.FAILED, _describe(error)))
            # Were we the ones to break the world, that could reach the leader before the reason does.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await self._channel.receive()
            raise WireError(f"the stage cannot be loaded: {_describe(error)}") from error

    async def _receive_weights(self, total_bytes: int) -> bytes:
        if not 0 < total_bytes <= _MAX_WEIGHTS_BYTES:
            raise WireError(f"weights of {total_bytes} bytes")
        weights = bytearray()
        while len(weights) < total_bytes:
            message = await self._channel.receive()
            if message.kind is not Kind.WEIGHTS or message.payload is None:
                raise WireError(f"expected weights, got {message.kind.name}")
            weights += message.payload.numpy().tobytes()
        if len(weights) != total_bytes:
            raise WireError(f"{len(weights)} bytes of weights, {total_bytes} were promised")
        return bytes(weights)

    async def _answer(self, message: Message) -> None:
        """Compute one batch, send what came of it, and count it."""
        outcome: Outcome = "unwanted"
        try:
            outcome = await self._compute_and_send(message)
        finally:
            self._metrics.batch_ended(message.stage, outcome)

    async def _compute_and_send(self, message: Message) -> Outcome:
        """What came of the batch; an exception of the stage is an answer too."""
        outcome: Outcome = "answered"
        try:
            if message.payload is None:
                raise WireError("a batch without a payload")
            output, compute_ns, waited_ns = await self.place.compute(message.stage, message.payload)
            self._metrics.computed(message.stage, compute_ns / 1e9)
            answer = Message(Kind.RESULT, message.batch, output, compute_ns, waited_ns, message.stage)
        except Exception as error:
            logger.exception("world=%s batch=%d stage=%d raised", self._world.name, message.batch, message.stage)
            answer = Message.of_text(Kind.FAILED, _describe(error), batch=message.batch)
            outcome = "failed"
        try:
            await self._channel.send(answer)
        except (BrokenWorldException, WorldClosedError):
            logger.debug("world=%s batch=%d is not wanted any more", self._world.name, message.batch)
            return "unwanted"
        return outcome


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]
