"""Loads stages on a worker, each followed by the self-test."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import aclosing

from msgspec.structs import replace

from multiworld_serving.common.config.process import release_free_memory
from multiworld_serving.common.service.snapshots import ReplicaState
from multiworld_serving.common.wire.inputs import BatchInputs, RowsLostError
from multiworld_serving.common.wire.link import Link
from multiworld_serving.common.wire.protocol import WireError, rows_of_payload, rows_payload
from multiworld_serving.common.wire.work import Batch, Computed, FetchWeights, Loaded, Weights, WorkFailedError
from multiworld_serving.server.leader.replicas.worker import SelfTestError, SentBatch, Worker
from multiworld_serving.server.leader.versions.stage_plan import StagePlan


class StageLoading:
    """
    Args:
        enter: called with the state of the worker.

    Attributes:
        plans: by version and stage: what the worker is to load or has loaded.
        limits: rows in a batch, and batches in flight.
    """

    def __init__(self, worker: Worker, plans: tuple[StagePlan, ...], enter: Callable[[ReplicaState], None]) -> None:
        self.plans = {(plan.number, plan.spec.index): plan for plan in plans}
        self.limits = 0, 0
        self._worker = worker
        self._enter = enter

    def plan_of(self, sent: SentBatch) -> StagePlan:
        """The stage that computes this batch. Raises WireError."""
        plan = self.plans.get((sent.version, sent.stage))
        if plan is None:
            raise WireError(f"an output of stage {sent.stage} of version {sent.version}, which is not loaded")
        return plan

    def forget(self, version: int) -> None:
        """The worker does not have this version any more."""
        self.plans = {key: plan for key, plan in self.plans.items() if key[0] != version}

    async def load(self, link: Link, plans: tuple[StagePlan, ...]) -> None:
        """Load these stages one after another.

        Raises:
            SelfTestError: the worker cannot load a stage, or computes a wrong output.
            LinkLostError, WireError: see `WorkerLink.load`.
        """
        for plan in plans:
            try:
                await self._assign(link, plan)
            except (
                WorkFailedError,
                RowsLostError,
                OSError,
            ) as error:  # OSError: the file with its weights cannot be read
                raise SelfTestError(f"{self._worker.name} cannot serve stage {plan.spec.index}: {error}") from error
        self._worker.loaded |= {plan.number for plan in plans}

    async def _assign(self, link: Link, plan: StagePlan) -> None:
        """Send one stage to the worker, unless it has it already, and compare its output for the self-test input with the reference."""
        self._enter_startup("loading")
        number, stage, (max_batch_size, window) = plan.number, plan.spec.index, self.limits
        self.plans[number, stage] = plan
        row_bytes = math.prod(plan.spec.output_rows.dims) * plan.output_dtype.itemsize
        link.max_bytes = max(link.max_bytes, max_batch_size * row_bytes)
        async with aclosing(link.stream(plan.assignment(max_batch_size, window))) as replies:
            async for reply in replies:
                match reply:
                    case FetchWeights():
                        await self._send_weights(link, plan)
                        self._enter_startup("warming")
                    case Loaded():
                        release_free_memory()  # of the weights, which several threads have read
                    case _:
                        raise WireError(f"unexpected {type(reply).__name__} about stage {stage}")
        if not len(plan.self_test_input):
            return
        self._enter_startup("checking")
        rows = plan.sent_test_input
        inputs = BatchInputs(len(rows), (), None, tuple(range(len(rows))), keep=False)
        if plan.spec.input_rows.varies:
            inputs = replace(inputs, row_bytes=rows.shape[1])
        reply = await link.call(Batch(stage, number, inputs), rows_payload(rows), timeout_s=None)
        if not isinstance(reply.body, Computed):
            raise WireError(f"unexpected {type(reply.body).__name__} about the self-test of stage {stage}")
        output = rows_of_payload(reply.payload, len(rows), plan.output_dtype, reply.body.row_shape)
        if wrong := plan.check_self_test(output):
            raise SelfTestError(f"stage {stage}: the join self-test failed: {wrong}")

    async def _send_weights(self, link: Link, plan: StagePlan) -> None:
        chunks = plan.weights.chunks()
        while self._worker.state != "broken" and (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            await link.wait_writable()
            link.send(Weights(plan.spec.index, plan.number), rows_payload(chunk))

    def _enter_startup(self, state: ReplicaState) -> None:
        """Enter a state of the startup sequence; does nothing if the link has been ready before."""
        if self._worker.ready_at_s is None:
            self._enter(state)
