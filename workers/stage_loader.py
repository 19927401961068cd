"""Receives and loads the stages that the leader assigns. Reuses stages that are still in memory."""

import asyncio
import hashlib
import logging
import math
import time
import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from multiworld_serving.common.config.process import check_memory, release_free_memory
from multiworld_serving.common.wire.inputs import BatchInputs
from multiworld_serving.common.wire.protocol import WireError, rows_of_payload
from multiworld_serving.common.wire.work import StageAssignment
from multiworld_serving.models.bundle.stage import BundleStageSpec
from multiworld_serving.models.errors import CompileError, StageSpecError
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.models.stages.stage import stage_spec
from multiworld_serving.workers.compute.engine import Engine, LoadedStage, StageTask

logger = logging.getLogger(__name__)

_COPIES_WHILE_LOADING = 2
"""Held at once while a stage is loaded: the received bytes, and the stage's parameters. Leaders assume this, too."""

_MAX_BATCH_BYTES = 1 << 36
"""Largest batch that a stage may be assigned for."""

_compiling: set[asyncio.Task[None]] = set()
"""asyncio itself keeps no reference to tasks."""


class AssignedStage:
    """A stage that a leader has assigned. Its weights follow in Weights messages after FetchWeights.

    Attributes:
        key: version and index.
        dtype: of its input, as that travels.
        float32_as: as which a float32 output travels.
        loaded: the stage in memory; None: it is not loaded yet.
    Raises:
        models.StageSpecError: the assignment is invalid.
    """

    def __init__(self, assignment: StageAssignment) -> None:
        self.assignment = assignment
        self.spec = spec = stage_spec(assignment.spec)
        if (
            isinstance(spec, BundleStageSpec)
            and assignment.max_batch_size * spec.input_rows.max_row_bytes > _MAX_BATCH_BYTES
        ):
            raise StageSpecError(
                f"batches of {assignment.max_batch_size} rows of {spec.input_rows.max_row_bytes} bytes; "
                f"expected at most {_MAX_BATCH_BYTES} bytes"
            )
        self.key = assignment.version, spec.index
        self.digest = assignment.digest
        self.dtype = spec.input_rows.dtype if spec.is_first else assignment.travels_as(spec.input_rows.dtype)
        self.float32_as = torch.float32 if spec.is_last else assignment.travels_as(torch.float32)
        self.loaded: LoadedStage | None = None
        self._weights: Tensor | None = None
        """Where the weights arrive; None: they are not expected."""
        self._arrived = 0
        self._complete = asyncio.Event()

    @property
    def missing_bytes(self) -> int:
        """Bytes of weights that are expected and have not arrived yet."""
        return 0 if self._weights is None else self.assignment.weights_bytes - self._arrived

    @property
    def max_batch_bytes(self) -> int:
        """Most bytes of the rows of a batch."""
        return self.assignment.max_batch_size * math.prod(self.spec.input_rows.dims) * self.dtype.itemsize

    def input_of(self, inputs: BatchInputs, payload: memoryview) -> tuple[tuple[int, ...], Tensor | None]:
        """The shape of the rows of a batch, and the rows in its message. Raises ValueError if the batch is invalid."""
        inputs.check(self.assignment.max_batch_size)
        expected = self.spec.input_rows
        row_shape = (inputs.row_bytes,) if inputs.row_bytes else expected.dims
        relayed_shape = (inputs.relayed_row_bytes,) if inputs.relayed_row_bytes else row_shape
        if not expected.accepts(row_shape) or not expected.accepts(relayed_shape) or relayed_shape > row_shape:
            raise WireError(f"a batch with rows of {row_shape}; expected {expected.dims}")
        relayed = rows_of_payload(payload, len(inputs.relayed_at), self.dtype, relayed_shape)
        return row_shape, relayed if inputs.relayed_at else None

    def add(self, chunk: memoryview) -> None:
        """Append a chunk of weights. Raises WireError if it is not expected."""
        if self._weights is None or not 0 < len(chunk) <= self.missing_bytes:
            raise WireError(f"{len(chunk)} bytes of weights; expected 1 to {self.missing_bytes}")
        self._weights[self._arrived : self._arrived + len(chunk)] = torch.frombuffer(chunk, dtype=torch.uint8)
        self._arrived += len(chunk)
        if not self.missing_bytes:
            self._complete.set()

    async def load(self, engine: Engine, owner: object, fetch: Callable[[], None]) -> float:
        """Load it, unless it is in memory. Returns the seconds that loading took.

        Args:
            owner: of the jobs.
            fetch: asks the leader for the weights. Not called if the stage is in memory.
        Raises:
            MemoryError: there is not enough memory next to the stages that are loaded.
            ModelError, RuntimeError: the weights are not those announced, do not match the stage, or the
                device cannot run it.
        """
        assignment, stages = self.assignment, engine.stages
        if (found := stages.get(self.digest)) is not None:
            self.loaded = found
            return 0.0
        engine.drop_kept()
        if stages:  # the kernel's OOM killer would end the stages that serve as well
            check_memory(_COPIES_WHILE_LOADING * assignment.weights_bytes)
        self._weights = weights = torch.empty(assignment.weights_bytes, dtype=torch.uint8)
        if len(weights):
            fetch()
            await self._complete.wait()
        began_s = time.monotonic()
        self._weights = None
        await engine.loader.run(owner, partial(_check_weights, weights, assignment.weights_sha256))
        tuning = Tuning(assignment.precision, assignment.optimize)
        task = StageTask(self.spec, weights, assignment.max_batch_size, tuning)
        self.loaded = stages[self.digest] = await engine.load(owner, task)
        if tuning.optimize == "compile":
            compiling = asyncio.create_task(_compile_and_replace(engine, weakref.ref(self.loaded), task))
            _compiling.add(compiling)
            compiling.add_done_callback(_compiling.discard)
        return time.monotonic() - began_s


def _check_weights(weights: Tensor, announced: str) -> None:
    """Raise StageSpecError for other weights than announced. Blocks for up to a second."""
    found = hashlib.sha256(weights.numpy().data).hexdigest()
    if found != announced:
        raise StageSpecError(f"the weights have the SHA-256 hash {found}, but {announced} was announced")


async def _compile_and_replace(engine: Engine, serving: "weakref.ref[LoadedStage]", task: StageTask) -> None:
    """Compile a stage while it serves. Independent of the leader that assigned it, because the next one may use it as well."""
    index = task.spec.index
    try:
        made = await engine.compile(task, lambda: serving() is not None)
        found = serving()
        if made is not None and found is not None:
            found.replace(made)
            logger.info("stage=%d execution_mode=%s", index, made.optimized)
    except (CompileError, MemoryError) as error:
        logger.warning("stage=%d stays as with --optimize fused, it cannot be compiled: %s", index, error)
    except Exception:
        logger.exception("stage=%d stays as with --optimize fused, it cannot be compiled", index)
    finally:
        release_free_memory()
