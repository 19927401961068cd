"""The leader's end of the world with one worker: load the stages, run the join self-test, then exchange batches until the world ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from multiworld import BrokenWorldException, Cause, JoinError, World, WorldManager
from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.service.snapshots import ReplicaState
from multiworld_serving.common.wire.inputs import ALL_ROWS, BatchInputs, RowRef, RowsLost, Source
from multiworld_serving.common.wire.join import JoinOffer
from multiworld_serving.common.wire.link import Link, LinkLostError
from multiworld_serving.common.wire.protocol import Received, WireError, rows_of_payload, rows_payload
from multiworld_serving.common.wire.work import (
    WORKER_PROTOCOL,
    Batch,
    Computed,
    Failed,
    Leaving,
    Release,
    Restart,
    Unload,
)
from multiworld_serving.server.leader.replicas.stage_loading import StageLoading
from multiworld_serving.server.leader.replicas.worker import Ending, LinkEndedError, SelfTestError, SentBatch, Worker
from multiworld_serving.server.leader.versions.stage_plan import StagePlan

logger = logging.getLogger(__name__)

LEADER_RANK = 0
_WORKER_RANK = 1
_JOINING_STATES: tuple[ReplicaState, ...] = ("joining", "loading", "warming", "checking")
_JOIN_WORLD_S = 10.0
"""Longest wait for a worker to join the world that it was offered."""
_MAX_UNUSED = 64
_RELEASE_S = 0.1
"""Outputs that a worker keeps are released when there are this many, or after this time if no batch is sent before."""


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """The output of a stage, which its worker keeps until it is released or the link ends.

    Attributes:
        row_bytes: see `BatchInputs`.
    """

    link: WorkerLink
    tensor: int
    rows: int
    row_bytes: int = 0

    @property
    def holder(self) -> str:
        """The worker that keeps it."""
        return self.link.worker.request.edge

    def inputs(self) -> BatchInputs:
        """The input of the next stage."""
        source = Source(self.holder, (RowRef(self.tensor, ALL_ROWS),), tuple(range(self.rows)))
        return BatchInputs(self.rows, (source,), row_bytes=self.row_bytes)

    def rows_at(self, rows: tuple[int, ...], at: tuple[int, ...]) -> Source:
        """Rows for the frontend that fetches them; they answer the samples `at` of its request."""
        return Source(self.holder, tuple(RowRef(self.tensor, row) for row in rows), at)

    def release(self) -> None:
        """Tell the worker that it is not needed any more."""
        self.link.release(self.tensor)


Outcome = Computed | Failed | RowsLost
"""Of a batch."""


class WorkerLink:
    """The connection to one worker: one world in one generation.

    Args:
        plans: the stages that the worker loads on joining: the stage of its slot, or all stages for a spare.
        on_state: called after every change of `worker.state`.
        on_batch: called with the outcome of a batch, and the output if it was computed. May raise WireError.
    """

    def __init__(
        self,
        worker: Worker,
        plans: tuple[StagePlan, ...],
        on_state: Callable[[WorkerLink], None],
        on_batch: Callable[[Worker, SentBatch, Outcome, Tensor | KeptOutput | None], None],
    ) -> None:
        self.worker = worker
        self._loading = StageLoading(worker, plans, self._enter)
        self._on_state = on_state
        self._on_batch = on_batch
        self._link: Link | None = None
        self._joining: asyncio.Task[World] | None = None
        self._unused: list[int] = []
        """Outputs that the worker keeps and nobody needs any more."""
        self._release_timer: asyncio.TimerHandle | None = None

    async def run(
        self, manager: WorldManager, host: str, port: int, *, join_timeout_s: float, max_batch_size: int, window: int
    ) -> None:
        """Form the world, load the stages, serve. Returns when the link has ended; `cause` says why."""
        self._loading.limits = max_batch_size, window
        preparing: asyncio.Task[None] | None = None
        try:
            offer, longest_s = JoinOffer(*self.worker.id), min(_JOIN_WORLD_S, join_timeout_s)
            self._joining = asyncio.create_task(offer.form(manager, 0, Address(host, port), longest_s))
            self._link = Link(await self._joining, _WORKER_RANK, WORKER_PROTOCOL, self._receive)
            preparing = asyncio.create_task(self._prepare(self._link, join_timeout_s))
            self._lost(await self._link.run())
        except BrokenWorldException as broken:
            self._lost(LinkLostError(str(broken), failed=True, ending=broken))
        except JoinError as error:  # the worker did not join the world that it was offered
            self._end(Cause.TIMEOUT, str(error))
        except asyncio.CancelledError:
            if self.worker.state != "broken":  # otherwise `fail` has cancelled the join
                raise
        except Exception as error:
            if self._link is not None:
                logger.exception("world=%s the link failed", self.worker.id)
            self._end(Cause.ERROR, f"{type(error).__name__}: {error}")
        finally:
            if preparing is not None:
                preparing.cancel()
            if self._link is not None:
                world, ending = self._link.world, self.worker.ending
                world.fail(Cause.ABORTED, LEADER_RANK, ending.detail if ending else "")
                if manager.worlds.get(world.name) is world:
                    await manager.close_world(world.name)

    def send(self, sent: SentBatch, inputs: BatchInputs) -> None:
        """Send a batch.

        Does not wait and does not raise when the link is broken; `on_state` reports the end of the link.
        """
        assert self._link is not None, "the worker has joined"
        relayed = b"" if inputs.relayed is None else rows_payload(inputs.relayed)
        self._release()  # in the same transfer
        body = Batch(sent.stage, sent.version, inputs, sent.request_ids)
        with suppress(LinkLostError):
            self._link.ask(body, relayed, partial(self._returned, sent, inputs.keep))

    def release(self, output: int) -> None:
        """The kept output with this id is not needed any more. The worker is told with the next batch, or a little later."""
        if self.worker.state in ("ready", "draining"):
            self._unused.append(output)
            if len(self._unused) >= _MAX_UNUSED:
                self._release()
            elif self._release_timer is None:
                self._release_timer = asyncio.get_running_loop().call_later(_RELEASE_S, self._release)

    async def load(self, plans: tuple[StagePlan, ...]) -> None:
        """Load another version on a serving worker and run the self-test. The worker serves its batches meanwhile.

        Raises:
            SelfTestError: the worker cannot load it or computes a wrong output; it continues to serve its other versions.
            LinkEndedError: the worker is lost or draining.
            TimeoutError: the caller's time limit expired. The link is in an undefined state: the caller must `fail` it.
        """
        worker = self.worker
        if worker.state != "ready":
            raise LinkEndedError(f"{worker.name} is {worker.state}")
        try:
            assert self._link is not None, "the worker is ready"
            await self._loading.load(self._link, plans)
        except LinkLostError as error:
            raise LinkEndedError(f"{worker.name} was lost while it loaded a version: {error}") from error
        except SelfTestError:
            self.unload(plans[0].number)  # also what it has loaded partly
            raise
        except WireError as error:
            self.fail(Cause.ERROR, str(error))
            raise LinkEndedError(f"{worker.name} violated the protocol: {error}") from error

    def unload(self, version: int) -> None:
        """Tell the worker to free a version, also one that it has loaded only partly."""
        if self.worker.state in ("ready", "draining"):
            self._send(Unload(version))
        self.worker.loaded.discard(version)
        self._loading.forget(version)

    def release_worker(self) -> None:
        """Ask the worker to join any other leader that can serve. It stays as long as there is none."""
        self._send(Leaving())

    def request_restart(self) -> None:
        """Ask the worker to leave and to restart its process."""
        self._send(Restart())

    def fail(self, cause: Cause, detail: str) -> None:
        """Break this link at once from the leader's side."""
        if self._link is not None:
            self._link.world.fail(cause, _WORKER_RANK, detail)
        self._end(cause, detail)
        if self._joining is not None:
            self._joining.cancel()

    def drain(self) -> None:
        """Enter the state "draining": the leader sends no new batches."""
        if self.worker.state == "ready":
            self._enter("draining")

    def close(self) -> None:
        """Close the world. The link ends with cause "left"."""
        if self._link is not None:
            self._link.world.close()

    # -- loading -------------------------------------------------------------------------------------------------------------

    async def _prepare(self, link: Link, join_timeout_s: float) -> None:
        """Load the stages on a worker that has joined. Ends the link if it cannot serve them."""
        try:
            async with asyncio.timeout(join_timeout_s):
                await self._loading.load(link, tuple(self._loading.plans.values()))
        except LinkLostError:
            return  # `run` knows why
        except LinkEndedError as error:
            self._abort(Cause.LEFT, str(error))
        except TimeoutError:
            self._abort(Cause.TIMEOUT, f"not ready within {join_timeout_s:g} s after it joined")
        except (SelfTestError, WireError) as error:
            self._abort(Cause.ERROR, str(error))
        except Exception as error:
            logger.exception("world=%s the stages cannot be sent", self.worker.id)
            self._abort(Cause.ERROR, f"{type(error).__name__}: {error}")
        else:
            self.worker.ready_at_s = time.monotonic()
            self._enter("ready")

    # -- serving -------------------------------------------------------------------------------------------------------------

    def _receive(self, received: Received) -> None:
        match received.body:
            case Leaving() if self.worker.state in ("ready", "draining"):
                self.drain()
            case Leaving():
                self._abort(Cause.LEFT, "the worker left before it was ready")
            case body:
                raise WireError(f"unexpected {type(body).__name__} from a worker")

    def _returned(self, sent: SentBatch, keep: bool, found: Received | LinkLostError) -> None:
        """Take the reply to a batch. Raises WireError if it is not one."""
        if isinstance(found, LinkLostError):
            sent.end(f"the worker was lost: {found}")
            return  # the end of the link is reported to `on_state`
        outcome, output = found.body, None
        if isinstance(outcome, Computed):
            self.worker.batches_done += 1
            output = _output_of(
                self, self._loading.plan_of(sent), outcome, found.payload, len(sent.requests), keep=keep
            )
        elif not isinstance(outcome, Failed | RowsLost):
            raise WireError(f"unexpected {type(outcome).__name__} about a batch")
        elif isinstance(outcome, RowsLost) and not keep:
            raise WireError("the worker has lost rows that were sent to it")
        self._on_batch(self.worker, sent, outcome, output)

    def _release(self) -> None:
        if self._release_timer is not None:
            self._release_timer.cancel()
            self._release_timer = None
        if self._unused:
            unused, self._unused = tuple(self._unused), []
            self._send(Release(unused))

    def _send(self, body: Release | Unload | Leaving | Restart) -> None:
        if self._link is not None:
            self._link.send(body)

    # -- ending --------------------------------------------------------------------------------------------------------------

    def _enter(self, state: ReplicaState) -> None:
        worker, now_s = self.worker, time.monotonic()
        if worker.state == "broken":  # while the stages were loaded, which may notice it later
            return
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

    def _lost(self, lost: LinkLostError) -> None:
        ending = lost.ending
        if ending is None:
            self._end(lost.cause, str(lost) if lost.failed else "closed by the leader")
        else:
            leader_failed = ending.rank == LEADER_RANK and ending.cause != Cause.ERROR
            self._end(ending.cause, ending.detail, leader_unresponsive=leader_failed)

    def _abort(self, cause: Cause, detail: str) -> None:
        """End the link, because the worker cannot serve."""
        self._end(cause, detail)
        if self._link is not None:
            self._link.world.fail(Cause.ABORTED, LEADER_RANK, detail)

    def _end(self, cause: Cause, detail: str, *, leader_unresponsive: bool = False) -> None:
        if self.worker.state == "broken":
            return
        silent_s = None if self._link is None else self._link.world.undetected_s
        self.worker.ending = Ending(str(cause), detail, silent_s, leader_unresponsive)
        if self._release_timer is not None:
            self._release_timer.cancel()
        self._enter("broken")


def _output_of(
    link: WorkerLink, plan: StagePlan, done: Computed, payload: memoryview, rows: int, *, keep: bool
) -> Tensor | KeptOutput:
    """The output of a batch with so many rows. Raises WireError if it is not one of the stage, or kept although it must be sent."""
    expected, row_shape = plan.spec.output_rows, done.row_shape
    if not expected.accepts(row_shape):
        raise WireError(f"an output with rows of {row_shape}; expected {expected.dims}")
    if done.tensor is None:
        return rows_of_payload(payload, rows, plan.output_dtype, row_shape)
    if not keep:
        raise WireError("the worker keeps an output that it must send")
    return KeptOutput(link, done.tensor, rows, row_shape[0] if expected.varies else 0)
