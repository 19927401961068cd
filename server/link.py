"""The leader's end of one leader-stage world: bring a worker up to serving, then carry batches until the world ends."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from multiworld import BrokenWorldException, Cause, JoinError, World, WorldClosedError, WorldManager
from server.plan import StagePlan
from server.predictor import ReplicaState
from server.slots import Slot
from wire import WORLD_BACKEND, Channel, JoinRequest, Kind, Message, TraceContext, WireError, trace_message

logger = logging.getLogger(__name__)

LEADER_RANK = 0
_WORKER_RANK = 1
_PIECE_BYTES = 8 << 20
_FORMING_S = 10.0
"""A worker that was offered a world comes at once, or not at all."""


class CanaryError(Exception):
    """The replica computes something else than the reference, or cannot load what it is to compute."""


class LinkEndedError(Exception):
    """The link ended, or its worker is leaving, before what was asked of it was done."""


class LinkListener(Protocol):
    """Who is told how a link fares, on the event loop."""

    def on_link_state(self, link: "Link") -> None: ...

    def on_leaving(self, link: "Link") -> None: ...


class BatchListener(Protocol):
    """Who is told what comes of the batches, on the event loop."""

    def on_result(self, link: "Link", message: Message) -> None:
        """Raises WireError when it cannot be the answer to what was sent: the link ends, and it is sent elsewhere."""

    def on_failed(self, link: "Link", message: Message) -> None: ...


class Link:
    """One link, one incarnation.

    Args:
        plans: the stages that the worker is to hold at first: its slot's, or all for a spare.
        slot: where it serves. Whoever moves it to another sets it.
        request: what the worker said of itself when it asked for work.

    Attributes:
        id: the world's name and epoch, "s0.r1#3": it never comes back.
        state: as `ReplicaState`; every change is told to the listener. A spare is "ready" too.
        cause, detail: why it ended, once `state` is "broken".
        blames_us: whether it was the worker who had not heard from us for too long.
        since_s: when `state` changed last, as `time.monotonic()`.
        holds: numbers of the versions whose stages it has loaded and passed the canary of.
        duties: numbers of the versions for which the scheduler sends it batches; whoever tells the scheduler keeps it.
    """

    def __init__(
        self,
        *,
        plans: tuple[StagePlan, ...],
        slot: Slot,
        epoch: int,
        request: JoinRequest,
        listener: LinkListener,
        batches: BatchListener,
    ) -> None:
        self.plans = plans
        self.slot = slot
        self.epoch = epoch
        self.world_name = slot.name
        self.id = f"{self.world_name}#{epoch}"
        self.request = request
        self.state: ReplicaState = "joining"
        self.since_s = time.monotonic()
        self.cause: str | None = None
        self.detail = ""
        self.blames_us = False
        self.silent_s: float | None = None
        self.ready_at_s: float | None = None
        self.batches_done = 0
        self.holds: set[int] = set()
        self.duties: set[int] = set()
        self._listener = listener
        self._batches = batches
        self._world: World | None = None
        self._channel: Channel | None = None
        self._forming: asyncio.Task[World] | None = None
        self._sends: set[asyncio.Task[None]] = set()
        self._replies: asyncio.Queue[Message | None] | None = None
        """What the worker says of a version that is being loaded while it serves; None = there will be nothing more."""
        self._max_batch_size, self._window = 0, 0

    @property
    def worker(self) -> str:
        """The name by which it joined."""
        return self.request.worker

    @property
    def stage(self) -> int:
        """The stage that it serves. To be asked of no spare."""
        assert self.slot.stage is not None, "a spare serves no stage"
        return self.slot.stage

    def __repr__(self) -> str:
        return f"<Link {self.id} {self.state}>"

    async def run(
        self, manager: WorldManager, host: str, port: int, *, join_timeout_s: float, max_batch_size: int, window: int
    ) -> None:
        """Form the world, bring the worker up, serve. Returns when the link has ended; `cause` says why."""
        self._max_batch_size, self._window = max_batch_size, window
        try:
            async with asyncio.timeout(join_timeout_s):
                await self._form(manager, host, port)
                await self._hold(self.plans)
            self.ready_at_s = time.monotonic()
            self._enter("ready")
            await self._serve()
        except BrokenWorldException as ending:
            self.blames_us = ending.rank == LEADER_RANK
            self._end(ending.cause, ending.detail)
        except WorldClosedError:
            self._end(Cause.LEFT, "closed by the leader")
        except JoinError as error:  # it was offered this world, and did not come
            self._end(Cause.TIMEOUT, str(error))
        except TimeoutError:
            self._end(Cause.TIMEOUT, f"not serving {join_timeout_s:g} s after it joined")
        except (CanaryError, WireError) as error:
            self._end("error", str(error))
        except asyncio.CancelledError:
            if self.state != "broken":  # else it was `give_up` that cancelled the forming
                raise
        except Exception as error:
            if self._world is not None:
                logger.exception("world=%s the link failed", self.id)
            self._end("error", f"{type(error).__name__}: {error}")
        finally:
            await self._free(manager)

    def send(self, batch: int, payload: Tensor, version: int, traced: Sequence[TraceContext] = ()) -> None:
        """Send a batch, and in front of it the spans of those of its requests that are traced.

        A failure shows as the link's end, not here.
        """
        if traced:
            self._post(trace_message(batch, traced))
        self._post(Message(Kind.BATCH, batch, payload, stage=self.stage, version=version))

    async def load(self, plans: tuple[StagePlan, ...]) -> None:
        """Have a worker that serves hold another version too, checked by canary. Its batches go on meanwhile.

        Raises:
            CanaryError: it cannot, or computes something else than we do; it serves on with what it has.
            LinkEndedError: it is gone, or going.
            TimeoutError: not within the time that the caller allows. The link is of no use any more: give it up.
        """
        if self.state != "ready" or self._replies is not None:
            raise LinkEndedError(f"{self.worker} is {self.state}")
        self._replies = asyncio.Queue()
        try:
            await self._hold(plans)
        except (BrokenWorldException, WorldClosedError) as error:
            raise LinkEndedError(f"{self.worker} is gone: {error}") from error
        finally:
            self._replies = None

    def drop(self, version: int) -> None:
        """Have the worker forget a version, whole or begun."""
        if self.state in ("ready", "draining"):
            self._post(Message(Kind.DROP, version=version))
        self.holds.discard(version)

    def ask_restart(self) -> None:
        """Ask the worker to leave, and its process to end and come back."""
        self._post(Message(Kind.RESTART))

    def give_up(self, cause: Cause, detail: str) -> None:
        """Break this link from our side, at once: it hangs, or its worker has joined again."""
        if self._world is not None:
            self._world.break_(cause, _WORKER_RANK, detail)
        self._end(cause, detail)
        if self._forming is not None:
            self._forming.cancel()

    def drain(self) -> None:
        """No new batches will be sent."""
        if self.state == "ready":
            self._enter("draining")
            self._end_replies()

    def close(self) -> None:
        """Say goodbye."""
        if self._world is not None:
            self._world.close()

    # -- bringing up ---------------------------------------------------------------------------------------------------------

    async def _form(self, manager: WorldManager, host: str, port: int) -> None:
        self._forming = asyncio.create_task(
            manager.initialize_world(
                self.world_name, 0, 2, WORLD_BACKEND, addr=host, port=port, epoch=self.epoch, timeout=_FORMING_S
            )
        )
        self._world = await self._forming
        self._channel = Channel(self._world, _WORKER_RANK, max_payload_bytes=1 << 30)

    async def _hold(self, plans: tuple[StagePlan, ...]) -> None:
        for plan in plans:
            await self._order(plan)
        self.holds |= {plan.number for plan in plans}

    async def _order(self, plan: StagePlan) -> None:
        """Have the worker load one stage, and see that it computes what we do."""
        channel = self._channel
        assert channel is not None
        self._step("loading")
        order = plan.order(self._max_batch_size, self._window)
        await channel.send(Message.of_text(Kind.ORDER, order.to_json(), version=plan.number))
        weights = torch.frombuffer(bytearray(plan.weights), dtype=torch.uint8)
        for piece in torch.split(weights, _PIECE_BYTES):
            await channel.send(Message(Kind.WEIGHTS, payload=piece))
        self._step("warming")
        await self._expect(Kind.READY, plan)
        self._step("checking")
        await channel.send(Message(Kind.BATCH, 0, plan.canary_input, stage=plan.spec.index, version=plan.number))
        answer = await self._expect(Kind.RESULT, plan)
        if wrong := plan.accepts(answer.payload):
            raise CanaryError(f"stage {plan.spec.index}: wrong answer to the canary: {wrong}")

    async def _expect(self, kind: Kind, plan: StagePlan) -> Message:
        message = await self._reply()
        if message.kind is Kind.FAILED:
            raise CanaryError(f"{self.worker} cannot serve stage {plan.spec.index}: {message.text()}")
        if message.kind is Kind.LEAVING:
            raise CanaryError("the worker left before it served")
        if message.kind is not kind:
            raise WireError(f"expected {kind.name}, got {message.kind.name}")
        return message

    async def _reply(self) -> Message:
        """What the worker says next of an order; nobody else reads the channel until it serves."""
        if self._replies is None:
            assert self._channel is not None
            return await self._channel.receive()
        message = await self._replies.get()
        if message is None:
            raise LinkEndedError(f"{self.worker} went while it loaded a version ({self.cause or 'it is leaving'})")
        return message

    def _step(self, state: ReplicaState) -> None:
        """A step of coming up; who serves already stays what it is."""
        if self.ready_at_s is None:
            self._enter(state)

    # -- serving -------------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        assert self._channel is not None
        while True:
            message = await self._channel.receive()
            match message.kind:
                case Kind.READY | Kind.RESULT | Kind.FAILED if not message.batch and self._replies is not None:
                    self._replies.put_nowait(message)
                case Kind.RESULT if message.batch and message.payload is not None:
                    self.batches_done += 1
                    self._batches.on_result(self, message)
                case Kind.FAILED if message.batch:
                    self._batches.on_failed(self, message)
                case Kind.READY | Kind.RESULT | Kind.FAILED if not message.batch and self.state == "draining":
                    logger.debug("world=%s %s of a version that is not waited for", self.id, message.kind.name)
                case Kind.LEAVING:
                    self.drain()
                    self._listener.on_leaving(self)
                case _:
                    raise WireError(f"unexpected {message.kind.name}")

    def _post(self, message: Message) -> None:
        task = asyncio.get_running_loop().create_task(self._send(message))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _send(self, message: Message) -> None:
        assert self._channel is not None
        try:
            await self._channel.send(message)
        except (BrokenWorldException, WorldClosedError):
            logger.debug("world=%s %s %d was not taken", self.id, message.kind.name, message.batch)

    # -- ending --------------------------------------------------------------------------------------------------------------

    def _enter(self, state: ReplicaState) -> None:
        was, now_s = self.state, time.monotonic()
        took_s, self.state, self.since_s = now_s - self.since_s, state, now_s
        log = logger.info if state != "broken" or self.cause == Cause.LEFT else logger.warning
        why = f" cause={self.cause} {self.detail}" if self.cause else ""
        log(
            "world=%s epoch=%d stage=%s replica=%d worker=%s %s->%s after_s=%.3f%s",
            *(self.world_name, self.epoch, "-" if self.slot.stage is None else self.slot.stage, self.slot.index),
            *(self.worker, was, state, took_s, why),
        )
        self._listener.on_link_state(self)

    def _end(self, cause: str, detail: str) -> None:
        if self.state == "broken":
            return
        self.cause, self.detail = str(cause), detail
        self._end_replies()
        if self._world is not None:
            self.silent_s = self._world.silent_s
        self._enter("broken")

    def _end_replies(self) -> None:
        if self._replies is not None:
            self._replies.put_nowait(None)

    async def _free(self, manager: WorldManager) -> None:
        world = self._world
        if world is not None:
            world.break_(Cause.ABORTED, 0, self.detail)
            if manager.worlds.get(self.world_name) is world:
                await manager.close_world(self.world_name)
        for task in self._sends:
            task.cancel()
        await asyncio.gather(*self._sends, return_exceptions=True)
