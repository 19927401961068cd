"""The leader's end of the world with one worker: load the stages, run the join self-test, then exchange batches until the world ends."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from multiworld import BrokenWorldException, Cause, JoinError, World, WorldClosedError, WorldManager
from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.inputs import BatchInputs
from multiworld_serving.common.wire.join import WORLD_BACKEND, JoinRequest
from multiworld_serving.common.wire.message import Message, MessageKind, RowShape, WireError
from multiworld_serving.common.wire.tracing import TraceContext, trace_message
from multiworld_serving.server.replicas.link_types import AssignmentRefusedError, LinkEndedError, SelfTestError, SlotId
from multiworld_serving.server.replicas.released_outputs import ReleasedOutputs
from multiworld_serving.server.replicas.reply_validator import ReplyValidator
from multiworld_serving.server.snapshots import ReplicaState
from multiworld_serving.server.versions.stage_plan import StagePlan

logger = logging.getLogger(__name__)

LEADER_RANK = 0
_WORKER_RANK = 1
_MAX_REPLIES = 3
"""Capacity of the reply queue while a version is loaded: one reply, and two end markers (drained, lost)."""
_JOINING_STATES: tuple[ReplicaState, ...] = ("joining", "loading", "warming", "checking")
_JOIN_WORLD_S = 10.0
"""Longest wait for a worker to join the world that it was offered."""


class LinkListener(Protocol):
    """Receives state changes of links. Called on the event loop."""

    def on_link_state(self, link: "WorkerLink") -> None: ...

    def on_leaving(self, link: "WorkerLink") -> None: ...


class BatchListener(Protocol):
    """Receives the results of batches. Called on the event loop."""

    def on_result(self, link: "WorkerLink", message: Message) -> None:
        """A batch in flight on this link returned: RESULT, whose rows, dtype and shape are checked, or KEPT, with the id of the output."""

    def on_failed(self, link: "WorkerLink", message: Message) -> None: ...

    def on_input_lost(self, link: "WorkerLink", message: Message) -> None:
        """The worker could not fetch the input of a batch in flight."""

    def on_busy(self, link: "WorkerLink") -> None:
        """The worker has not begun the batches in flight on this link."""


class WorkerLink:
    """The connection to one worker: one world in one generation.

    Args:
        plans: the stages that the worker loads on joining: the stage of its slot, or all stages for a spare.
        slot: the slot that the worker occupies. Updated when a spare is promoted.
        request: the worker's description of itself when it joined.

    Attributes:
        id: world name and generation, "s0.r1#3". Never reused.
        state: as `ReplicaState`; the listener is told every change. A spare is "ready" too.
        cause, detail: why it ended, once `state` is "broken".
        leader_unresponsive: whether the leader failed, not the worker, for example because the worker reported missed heartbeats.
        silent_s: seconds since the worker was last heard from, when the link broke.
        since_s: when `state` changed last, as `time.monotonic()`.
        ready_at_s: when it first was "ready", as `time.monotonic()`.
        obeys: name of the leader that the worker obeys instead of this one, as it reported; empty if it obeys this one.
        loaded_plans: numbers of the plans (`VersionPlan.number`) that the worker has loaded and that passed the self-test.
        active_plans: numbers of the plans for which the scheduler may send it batches. Set by the leader.
    """

    def __init__(
        self,
        *,
        plans: tuple[StagePlan, ...],
        slot: SlotId,
        generation: int,
        request: JoinRequest,
        listener: LinkListener,
        batches: BatchListener,
    ) -> None:
        self.plans = plans
        self.slot = slot
        self.generation = generation
        self.world_name = slot.name
        self.id = f"{self.world_name}#{generation}"
        self.request = request
        self.state: ReplicaState = "joining"
        self.since_s = time.monotonic()
        self.cause: str | None = None
        self.detail = ""
        self.leader_unresponsive = False
        self.silent_s: float | None = None
        self.ready_at_s: float | None = None
        self.batches_done = 0
        self.obeys = request.obeys
        self.loaded_plans: set[int] = set()
        self.active_plans: set[int] = set()
        self._listener = listener
        self._batches = batches
        self._world: World | None = None
        self._channel: Channel | None = None
        self._joining: asyncio.Task[World] | None = None
        self._replies: asyncio.Queue[Message | None] | None = None
        """Replies about a version that is loaded while the link serves; None marks the end."""
        self._max_batch_size, self._window = 0, 0
        self._validator = ReplyValidator()
        self._released = ReleasedOutputs(self._post)

    @property
    def worker(self) -> str:
        """The worker's name."""
        return self.request.worker

    @property
    def stage(self) -> int:
        """The stage that it serves. Must not be called for a spare."""
        assert self.slot.stage is not None, "a spare serves no stage"
        return self.slot.stage

    def __repr__(self) -> str:
        return f"<WorkerLink {self.id} {self.state}>"

    async def run(
        self, manager: WorldManager, host: str, port: int, *, join_timeout_s: float, max_batch_size: int, window: int
    ) -> None:
        """Form the world, load the stages, serve. Returns when the link has ended; `cause` says why."""
        self._max_batch_size, self._window = max_batch_size, window
        try:
            async with asyncio.timeout(join_timeout_s):
                await self._form_world(manager, host, port)
                await self._load_stages(self.plans)
            self.ready_at_s = time.monotonic()
            self._enter("ready")
            await self._serve()
        except BrokenWorldException as ending:
            self.leader_unresponsive = ending.rank == LEADER_RANK and ending.cause != Cause.ERROR
            self._end(ending.cause, ending.detail)
        except WorldClosedError:
            self._end(Cause.LEFT, "closed by the leader")
        except LinkEndedError as error:
            self._end(Cause.LEFT, str(error))
        except JoinError as error:  # the worker did not join the world that it was offered
            self._end(Cause.TIMEOUT, str(error))
        except TimeoutError:
            self._end(Cause.TIMEOUT, f"not ready within {join_timeout_s:g} s after it joined")
        except (SelfTestError, WireError) as error:
            self._end("error", str(error))
        except asyncio.CancelledError:
            if self.state != "broken":  # otherwise `fail` has cancelled the join
                raise
        except Exception as error:
            if self._world is not None:
                logger.exception("world=%s the link failed", self.id)
            self._end("error", f"{type(error).__name__}: {error}")
        finally:
            await self._free(manager)

    def send(
        self, batch: int, payload: Tensor | BatchInputs, version: int, traced: Sequence[TraceContext] = ()
    ) -> None:
        """Send a batch, or where the worker fetches it, preceded by the trace contexts of its traced requests.

        Does not wait and does not raise when the link is broken; the end of the link is reported to the listener.
        """
        if isinstance(payload, Tensor):
            self._validator.batch_sent(batch, len(payload), version, self.stage)
            message = Message(MessageKind.BATCH, batch, payload, stage=self.stage, version=version)
        else:
            self._validator.batch_sent(batch, payload.rows, version, self.stage, fetched=True, keeps=payload.keep)
            message = replace(payload, release=self._released.take()).message(batch, self.stage, version)
        if traced:
            self._post(trace_message(batch, traced))
        self._post(message)

    def kept(self, message: Message) -> tuple[int, RowShape]:
        """The id of an output that the worker keeps, and the shape of one of its rows. Raises WireError."""
        return self._validator.kept(message)

    def release(self, output: int) -> None:
        """The kept output with this id is not needed any more. The worker is told with the next batch, or a little later."""
        if self.state in ("ready", "draining"):
            self._released.add(output)

    async def load(self, plans: tuple[StagePlan, ...]) -> None:
        """Load another version on a serving worker and run the self-test. The worker serves its batches meanwhile.

        Raises:
            SelfTestError: the worker cannot load it or computes a wrong output; it continues to serve its other versions.
            LinkEndedError: the worker is lost or draining.
            TimeoutError: the caller's time limit expired. The link is in an undefined state: the caller must `fail` it.
        """
        if self.state != "ready" or self._replies is not None:
            raise LinkEndedError(f"{self.worker} is {self.state}")
        self._replies = asyncio.Queue(_MAX_REPLIES)
        try:
            await self._load_stages(plans)
        except (BrokenWorldException, WorldClosedError) as error:
            raise LinkEndedError(f"{self.worker} was lost: {error}") from error
        except WireError as error:
            self.fail(Cause.ERROR, str(error))
            raise LinkEndedError(f"{self.worker} violated the protocol: {error}") from error
        finally:
            self._replies = None

    def unload(self, version: int) -> None:
        """Tell the worker to free a version, also one that it has loaded only partly."""
        if self.state in ("ready", "draining"):
            self._post(Message(MessageKind.UNLOAD, version=version))
        self.loaded_plans.discard(version)
        self._validator.version_unloaded(version)

    def request_restart(self) -> None:
        """Ask the worker to leave and to restart its process."""
        self._post(Message(MessageKind.RESTART))

    def fail(self, cause: Cause, detail: str) -> None:
        """Break this link at once from the leader's side."""
        if self._world is not None:
            self._world.fail(cause, _WORKER_RANK, detail)
        self._end(cause, detail)
        if self._joining is not None:
            self._joining.cancel()

    def drain(self) -> None:
        """Enter the state "draining": the leader sends no new batches."""
        if self.state == "ready":
            self._enter("draining")
            self._end_replies()

    def close(self) -> None:
        """Close the world. The link ends with cause "left"."""
        if self._world is not None:
            self._world.close()

    # -- startup -------------------------------------------------------------------------------------------------------------

    async def _form_world(self, manager: WorldManager, host: str, port: int) -> None:
        self._joining = asyncio.create_task(
            manager.initialize_world(
                self.world_name,
                0,
                2,
                WORLD_BACKEND,
                addr=host,
                port=port,
                generation=self.generation,
                timeout=_JOIN_WORLD_S,
            )
        )
        self._world = await self._joining
        self._channel = Channel(self._world, _WORKER_RANK, self._validator.check)

    async def _load_stages(self, plans: tuple[StagePlan, ...]) -> None:
        for plan in plans:
            await self._assign_stage(plan)
        self.loaded_plans |= {plan.number for plan in plans}

    async def _assign_stage(self, plan: StagePlan) -> None:
        """Send one stage to the worker, unless it has it already, and compare its output for the self-test input with the reference."""
        channel = self._channel
        assert channel is not None
        self._enter_startup("loading")
        assignment = plan.assignment(self._max_batch_size, self._window)
        await channel.send(Message.from_text(MessageKind.ASSIGN, assignment.to_json(), version=plan.number))
        if (await self._expect((MessageKind.FETCH_WEIGHTS, MessageKind.READY), plan)).kind is MessageKind.FETCH_WEIGHTS:
            chunks = plan.weights.chunks()
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:  # reads a file
                await channel.send(Message(MessageKind.WEIGHTS, payload=chunk))
            self._enter_startup("warming")
            await self._expect((MessageKind.READY,), plan)
        self._enter_startup("checking")
        self._validator.stage_loaded(plan)
        self._validator.batch_sent(0, len(plan.self_test_input), plan.number, plan.spec.index)
        await channel.send(
            Message(MessageKind.BATCH, 0, plan.sent_test_input, stage=plan.spec.index, version=plan.number)
        )
        answer = await self._expect((MessageKind.RESULT,), plan)
        if wrong := plan.check_self_test(answer.payload):
            raise SelfTestError(f"stage {plan.spec.index}: the join self-test failed: {wrong}")

    async def _expect(self, kinds: tuple[MessageKind, ...], plan: StagePlan) -> Message:
        message = await self._reply()
        if message.kind is MessageKind.LEAVING:
            raise LinkEndedError("the worker left before it was ready")
        if message.kind is MessageKind.REFUSED:
            self.drain()
            self._listener.on_leaving(self)
            raise AssignmentRefusedError(f"{self.worker} refuses stage {plan.spec.index}: {message.reason()}")
        if message.kind not in (*kinds, MessageKind.FAILED):
            raise WireError(f"expected {' or '.join(kind.name for kind in kinds)}, got {message.kind.name}")
        number, stage = plan.number, plan.spec.index
        if (message.version, message.stage) != (number, stage):
            raise WireError(
                f"{message.kind.name} of stage {message.stage}, version {message.version}; expected stage {stage}, version {number}"
            )
        if message.kind is MessageKind.FAILED:
            raise SelfTestError(f"{self.worker} cannot serve stage {stage}: {message.reason()}")
        return message

    async def _reply(self) -> Message:
        """The worker's next reply while it loads a stage. Until it serves, only this method reads the channel."""
        if self._replies is None:
            while (received := await self._receive()).kind is MessageKind.BUSY:
                pass
            return received
        message = await self._replies.get()
        if message is None:
            raise LinkEndedError(f"{self.worker} was lost while it loaded a version ({self.cause or 'it is leaving'})")
        return message

    def _enter_startup(self, state: ReplicaState) -> None:
        """Enter a state of the startup sequence; does nothing if the link has been ready before."""
        if self.ready_at_s is None:
            self._enter(state)

    # -- serving -------------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            message = await self._receive()
            match message.kind:
                case MessageKind.FETCH_WEIGHTS | MessageKind.READY | MessageKind.REFUSED:
                    self._take_reply(message)
                case MessageKind.RESULT | MessageKind.FAILED if not message.batch:
                    self._take_reply(message)
                case MessageKind.RESULT | MessageKind.KEPT:
                    self.batches_done += 1
                    self._batches.on_result(self, message)
                case MessageKind.FAILED:
                    self._batches.on_failed(self, message)
                case MessageKind.INPUT_LOST:
                    self._batches.on_input_lost(self, message)
                case MessageKind.BUSY:
                    self._batches.on_busy(self)
                case MessageKind.LEAVING:
                    self.drain()
                    self._listener.on_leaving(self)
                case _:
                    raise WireError(f"unexpected {message.kind.name}")

    async def _receive(self) -> Message:
        assert self._channel is not None
        while (message := await self._channel.receive()).kind is MessageKind.OBEYS:
            self.obeys = message.reason()
        self._validator.received(message)
        return message

    def _take_reply(self, message: Message) -> None:
        """Pass a reply to `_reply`. Raises WireError if none is expected, or if the previous one is not read yet."""
        if self._replies is not None and self._replies.empty():
            self._replies.put_nowait(message)
        elif self._replies is not None:
            raise WireError(f"unexpected {message.kind.name}: the leader has not asked for another reply")
        elif self.state != "draining":
            raise WireError(f"unexpected {message.kind.name}")
        else:  # the version's load was cancelled
            logger.debug("world=%s ignored %s", self.id, message.kind.name)

    def _post(self, message: Message) -> None:
        """Start to send a message. Does nothing if the link has ended, which `run` reports."""
        assert self._channel is not None
        try:
            self._channel.start(message)
        except (BrokenWorldException, WorldClosedError):
            logger.debug("world=%s %s %d was not sent: the link has ended", self.id, message.kind.name, message.batch)

    # -- ending --------------------------------------------------------------------------------------------------------------

    def _enter(self, state: ReplicaState) -> None:
        was, now_s = self.state, time.monotonic()
        took_s, self.state, self.since_s = now_s - self.since_s, state, now_s
        level = logging.DEBUG if state in _JOINING_STATES else logging.INFO
        if state == "broken" and self.cause != Cause.LEFT:
            level = logging.WARNING
        why = f" cause={self.cause} {self.detail}" if self.cause else ""
        logger.log(
            level,
            "world=%s generation=%d stage=%s replica=%d worker=%s %s->%s after_s=%.3f%s",
            *(self.world_name, self.generation, "-" if self.slot.stage is None else self.slot.stage, self.slot.index),
            *(self.worker, was, state, took_s, why),
        )
        self._listener.on_link_state(self)

    def _end(self, cause: str, detail: str) -> None:
        if self.state == "broken":
            return
        self.cause, self.detail = str(cause), detail
        self._end_replies()
        self._released.take()
        if self._world is not None:
            self.silent_s = self._world.silent_s
        self._enter("broken")

    def _end_replies(self) -> None:
        if self._replies is not None:
            self._replies.put_nowait(None)

    async def _free(self, manager: WorldManager) -> None:
        world = self._world
        if world is not None:
            world.fail(Cause.ABORTED, 0, self.detail)
            if manager.worlds.get(self.world_name) is world:
                await manager.close_world(self.world_name)
