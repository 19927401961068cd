"""Loads stages on a worker, each followed by the self-test."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.message import Message, MessageKind, WireError
from multiworld_serving.server.replicas.worker import (
    AssignmentRefusedError,
    LinkEndedError,
    SelfTestError,
    SentBatch,
    Worker,
)
from multiworld_serving.server.snapshots import ReplicaState
from multiworld_serving.server.versions.stage_plan import StagePlan

logger = logging.getLogger(__name__)

_MAX_REPLIES = 3
"""Capacity of the reply queue while a version is loaded: one reply, and two end markers (drained, lost)."""


class StageLoading:
    """
    Args:
        in_flight: the batches in flight at the worker, to which the self-test is added.
        receive: returns the next message of the worker. Until the worker serves, nothing else receives.
        enter: called with the state of the worker.

    Attributes:
        plans: by version and stage: what the worker is to load or has loaded.
        limits: rows in a batch, and batches in flight.
    """

    def __init__(
        self,
        worker: Worker,
        plans: tuple[StagePlan, ...],
        in_flight: dict[int, SentBatch],
        receive: Callable[[], Awaitable[Message]],
        enter: Callable[[ReplicaState], None],
    ) -> None:
        self.plans = {(plan.number, plan.spec.index): plan for plan in plans}
        self.limits = 0, 0
        self._worker = worker
        self._in_flight = in_flight
        self._receive = receive
        self._enter = enter
        self._replies: asyncio.Queue[Message | None] | None = None
        """Replies about a version that is loaded while the link serves; None marks the end."""

    @property
    def is_busy(self) -> bool:
        """Whether a version is loaded while the worker serves."""
        return self._replies is not None

    def plan_of(self, sent: SentBatch) -> StagePlan:
        """The stage that computes this batch. Raises WireError."""
        plan = self.plans.get((sent.version, sent.stage))
        if plan is None:
            raise WireError(f"an output of stage {sent.stage} of version {sent.version}, which is not loaded")
        return plan

    def forget(self, version: int) -> None:
        """The worker does not have this version any more."""
        self.plans = {key: plan for key, plan in self.plans.items() if key[0] != version}

    async def load(self, channel: Channel | None, plans: tuple[StagePlan, ...]) -> None:
        """Load these stages one after another.

        Raises:
            SelfTestError: the worker cannot load a stage, or computes a wrong output.
            AssignmentRefusedError, LinkEndedError, WireError: see `WorkerLink.load`.
        """
        assert channel is not None, "the world has formed"
        for plan in plans:
            await self._assign(channel, plan)
        self._worker.loaded |= {plan.number for plan in plans}

    async def load_beside(self, channel: Channel | None, plans: tuple[StagePlan, ...]) -> None:
        """As `load`, while the link receives, which passes the replies to `take`."""
        self._replies = asyncio.Queue(_MAX_REPLIES)
        try:
            await self.load(channel, plans)
        finally:
            self._replies = None

    def take(self, message: Message) -> None:
        """Pass a reply to `_reply`. Raises WireError if none is expected, or if the previous one is not read yet."""
        if self._replies is not None and self._replies.empty():
            self._replies.put_nowait(message)
        elif self._replies is not None:
            raise WireError(f"unexpected {message.kind.name}: the leader has not asked for another reply")
        elif self._worker.state != "draining":
            raise WireError(f"unexpected {message.kind.name}")
        else:  # the version's load was cancelled
            logger.debug("world=%s ignored %s", self._worker.id, message.kind.name)

    def end(self) -> None:
        """The worker is lost, or drains."""
        if self._replies is not None:
            self._replies.put_nowait(None)

    async def _assign(self, channel: Channel, plan: StagePlan) -> None:
        """Send one stage to the worker, unless it has it already, and compare its output for the self-test input with the reference."""
        self._enter_startup("loading")
        number, stage = plan.number, plan.spec.index
        self.plans[number, stage] = plan
        assignment = plan.assignment(*self.limits)
        await channel.send(Message.from_text(MessageKind.ASSIGN, assignment.to_json(), stage=stage, version=number))
        if (await self._expect((MessageKind.FETCH_WEIGHTS, MessageKind.READY), plan)).kind is MessageKind.FETCH_WEIGHTS:
            chunks = plan.weights.chunks()
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:  # reads a file
                await channel.send(Message(MessageKind.WEIGHTS, payload=chunk, stage=stage, version=number))
            self._enter_startup("warming")
            await self._expect((MessageKind.READY,), plan)
        self._enter_startup("checking")
        rows = (0,) * len(plan.self_test_input)
        self._in_flight[0] = SentBatch(0, stage, number, rows, self._worker.replica(number), time.monotonic())
        await channel.send(Message(MessageKind.BATCH, 0, plan.sent_test_input, stage=stage, version=number))
        answer = await self._expect((MessageKind.RESULT,), plan)
        self._in_flight.pop(0, None)
        if wrong := plan.check_self_test(answer.payload):
            raise SelfTestError(f"stage {stage}: the join self-test failed: {wrong}")

    async def _expect(self, kinds: tuple[MessageKind, ...], plan: StagePlan) -> Message:
        message = await self._reply()
        if message.kind is MessageKind.LEAVING:
            raise LinkEndedError("the worker left before it was ready")
        if message.kind is MessageKind.REFUSED:
            self._enter("draining")
            raise AssignmentRefusedError(f"{self._worker.name} refuses stage {plan.spec.index}: {message.reason()}")
        if message.kind not in (*kinds, MessageKind.FAILED):
            raise WireError(f"expected {' or '.join(kind.name for kind in kinds)}, got {message.kind.name}")
        number, stage = plan.number, plan.spec.index
        if (message.version, message.stage) != (number, stage):
            raise WireError(
                f"{message.kind.name} of stage {message.stage}, version {message.version}; expected stage {stage}, version {number}"
            )
        if message.kind is MessageKind.FAILED:
            raise SelfTestError(f"{self._worker.name} cannot serve stage {stage}: {message.reason()}")
        return message

    async def _reply(self) -> Message:
        """The worker's next reply while it loads a stage. Until it serves, only this method reads the channel."""
        if self._replies is None:
            return await self._receive()
        message = await self._replies.get()
        if message is None:
            cause = self._worker.ending.cause if self._worker.ending else "it is leaving"
            raise LinkEndedError(f"{self._worker.name} was lost while it loaded a version ({cause})")
        return message

    def _enter_startup(self, state: ReplicaState) -> None:
        """Enter a state of the startup sequence; does nothing if the link has been ready before."""
        if self._worker.ready_at_s is None:
            self._enter(state)
