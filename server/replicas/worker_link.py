"""The leader's end of the world with one worker: load the stages, run the join self-test, then exchange batches until the world ends."""

import asyncio
import logging
import time
from collections.abc import Callable

import torch
from msgspec.structs import replace
from torch import Tensor

from multiworld import BrokenWorldException, Cause, JoinError, World, WorldClosedError, WorldManager
from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.inputs import BatchInputs
from multiworld_serving.common.wire.join import JoinOffer
from multiworld_serving.common.wire.message import Message, MessageKind, RowShape, WireError
from multiworld_serving.server.replicas.stage_loading import StageLoading
from multiworld_serving.server.replicas.worker import (
    Ending,
    LinkEndedError,
    SelfTestError,
    SentBatch,
    Worker,
)
from multiworld_serving.server.snapshots import ReplicaState
from multiworld_serving.server.versions.stage_plan import StagePlan

logger = logging.getLogger(__name__)

LEADER_RANK = 0
_WORKER_RANK = 1
_JOINING_STATES: tuple[ReplicaState, ...] = ("joining", "loading", "warming", "checking")
_JOIN_WORLD_S = 10.0
"""Longest wait for a worker to join the world that it was offered."""
_MAX_UNUSED = 64
_RELEASE_S = 0.1
"""Outputs that a worker keeps are released when there are this many, or after this time if no batch is sent before."""


class UnusedOutputs:
    """Outputs that a worker keeps and nobody needs any more. They are released together.

    Args:
        post: sends a message to the worker.
    """

    def __init__(self, post: Callable[[Message], None]) -> None:
        self._post = post
        self._numbers: list[int] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, number: int) -> None:
        """Release this output with the next batch, or a little later."""
        self._numbers.append(number)
        if len(self._numbers) >= _MAX_UNUSED:
            self._release()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_RELEASE_S, self._release)

    def take(self) -> tuple[int, ...]:
        """The outputs to release with this batch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        unused, self._numbers = tuple(self._numbers), []
        return unused

    def _release(self) -> None:
        if unused := self.take():
            self._post(Message(MessageKind.RELEASE, payload=torch.tensor(unused)))


class WorkerLink:
    """The connection to one worker: one world in one generation.

    Args:
        plans: the stages that the worker loads on joining: the stage of its slot, or all stages for a spare.
        on_state: called after every change of `worker.state`.
        on_batch: called with RESULT, KEPT, FAILED and INPUT_LOST of a batch in flight.
    """

    def __init__(
        self,
        worker: Worker,
        plans: tuple[StagePlan, ...],
        on_state: Callable[["WorkerLink"], None],
        on_batch: Callable[["WorkerLink", Message, SentBatch], None],
    ) -> None:
        self.worker = worker
        self._on_state = on_state
        self._on_batch = on_batch
        self._world: World | None = None
        self._channel: Channel | None = None
        self._joining: asyncio.Task[World] | None = None
        self._obstacle = ""
        self._in_flight: dict[int, SentBatch] = {}
        self._loading = StageLoading(worker, plans, self._in_flight, self._receive, self._enter)
        self._unused = UnusedOutputs(self._post)

    async def run(
        self, manager: WorldManager, host: str, port: int, *, join_timeout_s: float, max_batch_size: int, window: int
    ) -> None:
        """Form the world, load the stages, serve. Returns when the link has ended; `cause` says why."""
        worker, self._loading.limits = self.worker, (max_batch_size, window)
        try:
            async with asyncio.timeout(join_timeout_s):
                await self._form_world(manager, host, port)
                await self._loading.load(self._channel, tuple(self._loading.plans.values()))
            worker.ready_at_s = time.monotonic()
            self._enter("ready")
            await self._serve()
        except BrokenWorldException as ending:
            leader_failed = ending.rank == LEADER_RANK and ending.cause != Cause.ERROR
            self._end(ending.cause, ending.detail, leader_unresponsive=leader_failed)
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
            if worker.state != "broken":  # otherwise `fail` has cancelled the join
                raise
        except Exception as error:
            if self._world is not None:
                logger.exception("world=%s the link failed", worker.id)
            self._end("error", f"{type(error).__name__}: {error}")
        finally:
            await self._free(manager)

    def send(self, sent: SentBatch, payload: Tensor | BatchInputs) -> None:
        """Send a batch, or where the worker fetches it.

        Does not wait and does not raise when the link is broken; `on_state` reports the end of the link.
        """
        self._in_flight[sent.batch] = sent
        if isinstance(payload, Tensor):
            message = Message(MessageKind.BATCH, sent.batch, payload, stage=sent.stage, version=sent.version)
        else:
            sent.inputs = replace(payload, release=self._unused.take())
            message = sent.inputs.message(sent.batch, sent.stage, sent.version)
        self._post(message)

    def kept(self, message: Message, sent: SentBatch) -> tuple[int, RowShape]:
        """The id of an output that the worker keeps, and the shape of one of its rows. Raises WireError."""
        assert message.payload is not None, "`_check` requires a payload"
        number, *dims = message.payload.tolist()
        expected = self._loading.plan_of(sent).output_shape
        if not expected.accepts(tuple(dims)):
            raise WireError(f"KEPT with rows of {tuple(dims)}; expected {expected}")
        return number, RowShape(tuple(dims), expected.varies)

    def release(self, output: int) -> None:
        """The kept output with this id is not needed any more. The worker is told with the next batch, or a little later."""
        if self.worker.state in ("ready", "draining"):
            self._unused.add(output)

    async def load(self, plans: tuple[StagePlan, ...]) -> None:
        """Load another version on a serving worker and run the self-test. The worker serves its batches meanwhile.

        Raises:
            SelfTestError: the worker cannot load it or computes a wrong output; it continues to serve its other versions.
            LinkEndedError: the worker is lost or draining.
            TimeoutError: the caller's time limit expired. The link is in an undefined state: the caller must `fail` it.
        """
        worker = self.worker
        if worker.state != "ready" or self._loading.is_busy:
            raise LinkEndedError(f"{worker.name} is {worker.state}")
        try:
            await self._loading.load_beside(self._channel, plans)
        except (BrokenWorldException, WorldClosedError) as error:
            raise LinkEndedError(f"{worker.name} was lost: {error}") from error
        except SelfTestError:
            self.unload(plans[0].number)  # also what it has loaded partly
            raise
        except WireError as error:
            self.fail(Cause.ERROR, str(error))
            raise LinkEndedError(f"{worker.name} violated the protocol: {error}") from error

    def unload(self, version: int) -> None:
        """Tell the worker to free a version, also one that it has loaded only partly."""
        if self.worker.state in ("ready", "draining"):
            self._post(Message(MessageKind.UNLOAD, version=version))
        self.worker.loaded.discard(version)
        self._loading.forget(version)

    def tell_obstacle(self, obstacle: str) -> None:
        """Tell the worker, as soon as it has joined, why this leader cannot serve. An empty text means that it can serve."""
        self._obstacle = obstacle
        if self._channel is not None:
            self._post(Message.from_text(MessageKind.UNABLE, obstacle))

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
        if self.worker.state == "ready":
            self._loading.end()
            self._enter("draining")

    def close(self) -> None:
        """Close the world. The link ends with cause "left"."""
        if self._world is not None:
            self._world.close()

    # -- startup -------------------------------------------------------------------------------------------------------------

    async def _form_world(self, manager: WorldManager, host: str, port: int) -> None:
        self._joining = asyncio.create_task(
            JoinOffer(*self.worker.id).form(manager, 0, Address(host, port), _JOIN_WORLD_S)
        )
        self._world = await self._joining
        self._channel = Channel(self._world, _WORKER_RANK, self._check)
        if self._obstacle:
            self.tell_obstacle(self._obstacle)

    # -- serving -------------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            message = await self._receive()
            if message.kind is MessageKind.LEAVING:
                self.drain()
            elif message.batch:
                if message.kind in (MessageKind.RESULT, MessageKind.KEPT):
                    self.worker.batches_done += 1
                self._on_batch(self, message, self._in_flight.pop(message.batch))
            else:
                self._loading.take(message)

    async def _receive(self) -> Message:
        assert self._channel is not None
        while (message := await self._channel.receive()).kind is MessageKind.OBEYS:
            self.worker.obeys = message.reason()
        return message

    def _check(self, message: Message) -> None:
        """Decide whether the worker may send this now, before memory is allocated for the payload; see `Channel`. Raises WireError."""
        sent = self._in_flight.get(message.batch)
        match message.kind:
            case MessageKind.RESULT if sent is not None:
                plan = self._loading.plan_of(sent)
                message.require_batch(plan.output_dtype, plan.output_shape, len(sent.requests), len(sent.requests))
            case MessageKind.KEPT if sent is not None and sent.inputs is not None and sent.inputs.keep:
                count = 1 + len(self._loading.plan_of(sent).output_shape.dims)
                message.require_batch(torch.int64, (), count, count)
            case MessageKind.INPUT_LOST if sent is not None and sent.inputs is not None:
                message.require_text()
            case MessageKind.FAILED if sent is not None or not message.batch:
                message.require_text()
            case MessageKind.RESULT | MessageKind.KEPT | MessageKind.INPUT_LOST | MessageKind.FAILED:
                raise WireError(
                    f"{message.kind.name} of batch {message.batch}, which is not in flight here, or not for that"
                )
            case MessageKind.REFUSED | MessageKind.OBEYS if not message.batch:
                message.require_text()
            case MessageKind.READY | MessageKind.FETCH_WEIGHTS | MessageKind.LEAVING if not message.batch:
                message.require_no_payload()
            case _:
                raise WireError(f"unexpected {message.kind.name} {message.batch} from a worker")

    def _post(self, message: Message) -> None:
        """Start to send a message. Does nothing if the link has ended, which `run` reports."""
        assert self._channel is not None
        try:
            self._channel.start(message)
        except (BrokenWorldException, WorldClosedError):
            logger.debug(
                "world=%s %s %d was not sent: the link has ended", self.worker.id, message.kind.name, message.batch
            )

    # -- ending --------------------------------------------------------------------------------------------------------------

    def _enter(self, state: ReplicaState) -> None:
        worker, now_s = self.worker, time.monotonic()
        was, took_s = worker.state, now_s - worker.since_s
        worker.state, worker.since_s = state, now_s
        level = logging.DEBUG if state in _JOINING_STATES else logging.INFO
        why = ""
        if worker.ending is not None:
            why = f" cause={worker.ending.cause} {worker.ending.detail}"
            level = logging.INFO if worker.ending.cause == Cause.LEFT else logging.WARNING
        logger.log(
            level,
            "world=%s generation=%d stage=%s replica=%d worker=%s %s->%s after_s=%.3f%s",
            *(*worker.id, "-" if worker.slot.stage is None else worker.slot.stage, worker.slot.index),
            *(worker.name, was, state, took_s, why),
        )
        self._on_state(self)

    def _end(self, cause: str, detail: str, *, leader_unresponsive: bool = False) -> None:
        if self.worker.state == "broken":
            return
        silent_s = None if self._world is None else self._world.undetected_s
        self.worker.ending = Ending(str(cause), detail, silent_s, leader_unresponsive)
        self._loading.end()
        self._unused.take()
        self._enter("broken")

    async def _free(self, manager: WorldManager) -> None:
        world = self._world
        if world is not None:
            world.fail(Cause.ABORTED, LEADER_RANK, self.worker.ending.detail if self.worker.ending else "")
            if manager.worlds.get(world.name) is world:
                await manager.close_world(world.name)
