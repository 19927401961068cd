"""What the service computes: the served model, its versions, and predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec
from torch import Tensor

from multiworld_serving.common.wire.inputs import Source
from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.models.bundle.rows import RowFormat
from multiworld_serving.models.stages.objects import OBJECT_ROWS
from multiworld_serving.models.stages.pipeline import PipelineDescription

MAX_ROW_BYTES = 1 << 27
"""Largest row that a frontend and a leader send each other. The largest image, 4096 x 4096 pixels, has 48 MiB."""


class ImageSizes(NamedTuple):
    """How an image becomes the input of the model."""

    resize_size: int
    """Pixels: the image's shorter side is resized to this."""
    crop_size: int
    """Pixels: side of the center crop; at most `resize_size`."""


@dataclass(frozen=True)
class ServedModel:
    """The model's interface. `Manifest` checks that images and labels fit its inputs and outputs.

    Raises:
        BundleError: a row of its inputs or outputs is impossible.
        ValueError: a row is too large.
    """

    name: str
    """For example "resnet50"."""
    version: str
    """The first version: "IMAGENET1K_V2", "random:0", or a file's stem and digest. `LeaderPool.version` is the current one."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dimensions: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """(least, most) length of each variable dimension."""
    image: ImageSizes | None = None
    """None: the input is not an image. Else it is uint8 [batch, 3, crop_size, crop_size]."""
    labels: tuple[str, ...] = ()
    """One per class, if the output is the probabilities of classes [batch, …, classes]; else empty."""
    pipeline: PipelineDescription | None = None
    """Of a pipeline in Python, whose rows are objects; it has no inputs and outputs then."""

    def __post_init__(self) -> None:
        for what, rows in (("inputs", self.input_rows), ("outputs", self.output_rows)):
            if rows.max_row_bytes > MAX_ROW_BYTES:
                raise ValueError(
                    f"the {what} of one sample have {rows.max_row_bytes} bytes; at most {MAX_ROW_BYTES} are sent"
                )

    @cached_property
    def input_rows(self) -> RowFormat:
        """How the inputs of one sample travel."""
        return OBJECT_ROWS if self.pipeline else RowFormat(self.inputs, self.dimensions)

    @cached_property
    def output_rows(self) -> RowFormat:
        """How the outputs of one sample travel."""
        return OBJECT_ROWS if self.pipeline else RowFormat(self.outputs, self.dimensions)

    @property
    def classifies_images(self) -> bool:
        """Whether `/predict` answers an image with labels."""
        return self.image is not None and bool(self.labels)

    def __str__(self) -> str:
        """The interface in one line."""
        if self.pipeline is not None:
            return f"{self.name} ({' -> '.join(each.name for each in self.pipeline.stages)})"
        inputs, outputs = (
            ", ".join(f"{each.name} {each.dtype} [{', '.join(map(str, each.shape))}]" for each in tensors)
            for tensors in (self.inputs, self.outputs)
        )
        ranges = "".join(f", {name} {least} to {most}" for name, (least, most) in self.dimensions.items())
        return f"{self.name} ({inputs} -> {outputs}{ranges}, {len(self.labels)} labels)"


class ModelVersion(NamedTuple):
    """One set of weights."""

    number: int
    """Starts at 1. A recent version keeps its number when it is loaded again."""
    name: str
    """For example "IMAGENET1K_V2". Only a label."""
    digest: str = ""
    """Hash of its graph and weights: what the version is."""


@dataclass(frozen=True, slots=True)
class RestartStep:
    """Progress of one worker: `left_s` is the time until it left, `back_s` the time until its slot was ready again."""

    worker: str
    slot: str
    state: Literal["restarting", "restarted"]
    number: int
    total: int
    left_s: float | None = None
    back_s: float | None = None


class StageAttempt(msgspec.Struct):
    """One sending of a batch to a worker, in a `Trace`."""

    batch: int
    stage: int
    rows: int
    kind: str
    """See `SendKind`."""
    replica: str
    """World, generation and version of the model."""
    worker: str
    sent_s: float
    ended_s: float = 0.0
    """When the result came, or the worker was lost; 0 = not yet."""
    compute_s: float = 0.0
    transfer_s: float = 0.0
    error: str = "no result"
    """Why it returned no output; empty if it did."""
    stage_name: str = ""
    """Its class, or where the model is cut."""


class Trace(msgspec.Struct):
    """What the leader has done with a traced request. Times are those of its `time.monotonic()`."""

    arrived_s: float
    deadline_s: float
    """The deadline of the request. The frontend knows it on its own clock."""
    attempts: list[StageAttempt]


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The model's outputs for the samples of a request, and how they were computed. All samples were computed by one version.

    Also the message with which a leader answers. Its rows are the payload of the message.
    """

    output: Tensor
    """Output rows [N, …] on the CPU, in the format of `ServedModel.output_rows`. Rows that workers keep are listed in `kept` instead."""
    model: str
    version: str
    queue_s: float
    """Seconds that were neither compute nor transfer: waiting in the leader and in workers, and lost attempts."""
    compute_s: float
    """Seconds of compute at the workers, summed over the stages; of the slowest batch if the samples were in several."""
    transfer_s: float
    """Seconds on the links, both directions, summed over the stages; of the slowest batch."""
    attempts: int
    """1 + the number of times that a batch with these samples was sent again. Hedges do not count."""
    path: tuple[str, ...]
    """The world that computed each stage, in order; for the sample that was answered last."""
    batch_size: int = 1
    """The most samples that the last stage answers together: those of one batch."""
    version_number: int = 1
    """See `ModelVersion.number`."""
    version_digest: str = ""
    """See `ModelVersion.digest`."""
    kept: tuple[Source, ...] = ()
    """Rows of the output that workers keep, with the samples that they answer. The leader sends them, and the frontend fetches the rows."""
    route: tuple[str, ...] = ()
    """The replica that computed each stage; see `Predict.route`."""
    row_bytes: int = 0
    """Length of these rows if the lengths of outputs vary; otherwise 0."""
    trace: Trace | None = None
    """None = the request is not traced."""
