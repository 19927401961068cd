"""The computing half of a worker: one stage on one device, on a thread of its own, so that the event loop never waits for it."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from models import Stage, StageSpec, build_stage

logger = logging.getLogger(__name__)


class Engine:
    """Runs jobs one at a time, in order, on one daemon thread: a model that never returns holds up nobody else's exit."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stage: Stage | None = None
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._busy_since_s: float | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def busy_s(self) -> float:
        """How long the current job has been running; 0 when idle."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def close(self) -> None:
        """Let the thread end once its jobs are done. Does not wait."""
        self._jobs.put(None)

    async def load(self, spec: StageSpec, weights: bytes, row_shape: tuple[int, ...], max_batch_size: int) -> float:
        """Build the stage, load its weights and run it once for each of the smallest and largest batch. Gives the seconds taken.

        Raises:
            StageError, RuntimeError, safetensors.SafetensorError: spec and weights do not fit each other, or this device.
        """
        started_s = time.monotonic()
        await self._run(lambda: self._load(spec, weights, row_shape, max_batch_size))
        return time.monotonic() - started_s

    async def compute(self, batch: Tensor) -> tuple[Tensor, int, int]:
        """The stage's output for a batch: (CPU tensor, nanoseconds computed, nanoseconds waited). Raises what the stage raises."""
        asked_ns = time.perf_counter_ns()

        def compute() -> tuple[Tensor, int, int]:
            started_ns = time.perf_counter_ns()
            output = self._forward(batch)
            return output, time.perf_counter_ns() - started_ns, started_ns - asked_ns

        result: tuple[Tensor, int, int] = await self._run(compute)
        return result

    def _load(self, spec: StageSpec, weights: bytes, row_shape: tuple[int, ...], max_batch_size: int) -> None:
        stage = build_stage(spec)
        stage.load_state_dict(safetensors.torch.load(weights), strict=True)
        self._stage = stage.to(self.device)
        dtype = torch.uint8 if spec.is_first else torch.float32
        for rows in {1, max_batch_size}:
            self._forward(torch.zeros((rows, *row_shape), dtype=dtype))

    def _forward(self, batch: Tensor) -> Tensor:
        assert self._stage is not None, "the order comes before the batches"
        with torch.inference_mode():
            output: Tensor = self._stage(batch.to(self.device))
            return output.cpu().contiguous()

    async def _run(self, call: Callable[[], Any]) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._jobs.put((call, future))
        return await future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, future = job
            if future.cancelled():
                continue
            self._busy_since_s = time.monotonic()
            result, error = None, None
            try:
                result = call()
            except Exception as failure:  # noqa: BLE001 - whatever a model raises is the batch's outcome, not our end
                error = failure
            self._busy_since_s = None
            try:
                future.get_loop().call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the loop has ended
                return
            del job, call, future, result, error


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
