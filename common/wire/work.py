"""What leaders and workers say to each other: one type for each kind of message.

A leader assigns a stage with a call, and sends its weights if the worker asks for them. Each batch is a call too. Rows are payloads.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from multiworld.texts import one_line
from multiworld_serving.common.wire.inputs import BatchInputs, RowsLost
from multiworld_serving.common.wire.join import EDGE_DTYPES
from multiworld_serving.common.wire.protocol import Body, Failure, Protocol

_Version = Annotated[int, Meta(ge=1, lt=1 << 32)]


class StageAssignment(Body, frozen=True):
    """Leader to worker: load and serve a stage, next to those of other versions, until it is unloaded.

    Replies: the step FetchWeights unless the worker has the stage, then Loaded or Failed.

    Attributes:
        spec: a models.StageSpec as JSON.
        weights_bytes: number of bytes that follow in Weights messages, if the worker asks for it with FetchWeights; 0: a stage in Python.
        weights_sha256: hash of these bytes in hexadecimal digits.
        window: most batches that the leader keeps in flight for a stage.
        version: the leader's number of this model version; batches refer to it.
        precision, optimize, edge_dtype: see models.Tuning.
    """

    spec: str
    weights_bytes: Annotated[int, Meta(ge=0, lt=1 << 48)]
    weights_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    max_batch_size: Annotated[int, Meta(ge=1, le=1024)]
    window: Annotated[int, Meta(ge=1, le=64)]
    version: _Version
    precision: str = "float32"
    optimize: str = "eager"
    edge_dtype: Annotated[str, Meta(pattern=rf"^({'|'.join(EDGE_DTYPES)})\Z")] = "float32"

    @property
    def digest(self) -> str:
        """Hash of everything that the loaded stage depends on: assignments with equal digests can share one stage.

        It includes the largest batch size, for which stages are optimized.
        """
        loading = (self.spec, self.max_batch_size, self.precision, self.optimize, self.edge_dtype, self.weights_sha256)
        return hashlib.sha256(msgspec.json.encode(loading)).hexdigest()

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """dtype as which a tensor of this dtype travels between stages."""
        return EDGE_DTYPES[self.edge_dtype] if dtype == torch.float32 else dtype


class FetchWeights(Body, frozen=True):
    """Worker to leader: send the weights of the assigned stage."""


class Weights(Body, frozen=True):
    """Leader to worker: the payload is the next part of the weights of an assigned stage."""

    stage: int
    version: _Version


class Loaded(Body, frozen=True):
    """Worker to leader: the stage is loaded and warmed up."""


class Batch(Body, frozen=True):
    """Leader to worker: compute a batch. The payload has the rows `inputs.relayed`. Reply: Computed, RowsLost or Failed.

    Attributes:
        request_ids: the ids of its requests, separated by commas, for the log.
    """

    stage: int
    version: _Version
    inputs: BatchInputs
    request_ids: str = ""


class Computed(Body, frozen=True):
    """Worker to leader: the output of a batch, which is the payload unless the worker keeps it.

    Attributes:
        compute_ns, waited_us: how long the worker computed, and how long the batch waited before.
        row_shape: of the output.
        tensor: id of the output that the worker keeps.
    """

    compute_ns: Annotated[int, Meta(ge=0)]
    waited_us: Annotated[int, Meta(ge=0)]
    row_shape: Annotated[tuple[int, ...], Meta(max_length=8)]
    tensor: int | None = None


class WorkFailedError(Exception):
    """A worker has raised an exception."""


class Failed(Failure, frozen=True):
    """Worker to leader: the stage raised, or cannot be loaded."""

    why: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        return cls(one_line(f"{type(error).__name__}: {error}"))

    def error(self) -> Exception:
        return WorkFailedError(one_line(self.why))


class Release(Body, frozen=True):
    """Leader to worker: these outputs are not needed any more."""

    outputs: tuple[int, ...]


class Unload(Body, frozen=True):
    """Leader to worker: unload the stages of this version."""

    version: int


class Restart(Body, frozen=True):
    """Leader to worker: leave and exit. The supervisor starts the process again."""


class Leaving(Body, frozen=True):
    """Worker to leader: send no new batches, and close the world after the last reply.

    Leader to worker: this leader stops, or cannot serve what the other leaders serve. Join any other leader that can.
    """


WORKER_PROTOCOL = Protocol(
    StageAssignment
    | FetchWeights
    | Weights
    | Loaded
    | Batch
    | Computed
    | RowsLost
    | Failed
    | Release
    | Unload
    | Restart
    | Leaving,
    Failed.of,
)
