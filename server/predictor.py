"""The interface between the HTTP frontend and the pipeline.

The leader implements `Pipeline`. The HTTP code depends on this module only.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.models.bundle.nodes import BATCH
from multiworld_serving.models.bundle.rows import RowFormat

ReplicaState = Literal["absent", "joining", "loading", "warming", "checking", "ready", "draining", "left", "broken"]
"""joining: the world forms; loading: the weights are sent; warming: the worker warms up; checking: the join self-test runs;
left: the worker left on purpose; broken: it failed."""

ServiceState = Literal["ready", "degraded", "not_ready", "unloaded", "draining"]
"""degraded: it serves, but the next failure may end that: a stage has lost its spare replica, or a leader is not ready."""

Transport = Literal["relay", "edges"]
"""relay: through a leader; edges: directly between processes, and through a leader where an edge cannot be opened."""
PairTransport = Literal["shared_memory", "tcp", "relay"]
"""relay: the consumer could not reach the producer within the last minute."""


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
    """The model's interface.

    Raises:
        BundleError: a row of its inputs or outputs is impossible.
        ValueError: sizes of images or labels do not fit its inputs and outputs, or a row is too large.
    """

    name: str
    """For example "resnet50"."""
    version: str
    """The first version: "IMAGENET1K_V2", "random:0", or a file's stem and digest. `Predictor.version` is the current one."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dimensions: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """(least, most) length of each variable dimension."""
    image: ImageSizes | None = None
    """None: the input is not an image. Else it is uint8 [batch, 3, crop_size, crop_size]."""
    labels: tuple[str, ...] = ()
    """One per class, if the output is the probabilities of classes [batch, classes]; else empty."""

    def __post_init__(self) -> None:
        if self.image is not None:
            side = self.image.crop_size
            if not 1 <= side <= self.image.resize_size:
                raise ValueError(f"crop_size must be 1 to resize_size ({self.image.resize_size}), not {side}")
            if [(each.dtype, each.shape) for each in self.inputs] != [("uint8", (BATCH, 3, side, side))]:
                raise ValueError(f"the input of images is not uint8 [{BATCH}, 3, {side}, {side}]")
        if self.labels and [each.shape for each in self.outputs] != [(BATCH, len(self.labels))]:
            raise ValueError(f"the output is not [{BATCH}, {len(self.labels)}], one number for each label")
        for what, rows in (("inputs", self.input_rows), ("outputs", self.output_rows)):
            if rows.max_row_bytes > MAX_ROW_BYTES:
                raise ValueError(
                    f"the {what} of one sample have {rows.max_row_bytes} bytes; at most {MAX_ROW_BYTES} are sent"
                )

    @classmethod
    def image_classifier(cls, name: str, version: str, labels: tuple[str, ...], sizes: ImageSizes) -> ServedModel:
        """A model with an image `input` and the `probabilities` of classes."""
        image = TensorSpec("input", "uint8", (BATCH, 3, sizes.crop_size, sizes.crop_size))
        probabilities = TensorSpec("probabilities", "float32", (BATCH, len(labels)))
        return cls(name, version, (image,), (probabilities,), {}, sizes, labels)

    @cached_property
    def input_rows(self) -> RowFormat:
        """How the inputs of one sample travel."""
        return RowFormat(self.inputs, self.dimensions)

    @cached_property
    def output_rows(self) -> RowFormat:
        """How the outputs of one sample travel."""
        return RowFormat(self.outputs, self.dimensions)

    @property
    def classifies_images(self) -> bool:
        """Whether `/predict` answers an image with labels."""
        return self.image is not None and bool(self.labels)

    def __str__(self) -> str:
        """The interface in one line."""
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
    """For example "IMAGENET1K_V2"."""


class KeptRow(NamedTuple):
    """The row of a last stage's output that a worker keeps for a frontend."""

    holder: str
    """The worker: HOST:PORT/INCARNATION."""
    tensor: int
    row: int
    shape: tuple[int, ...]
    """Of the row."""


@dataclass(frozen=True)
class Prediction:
    """The model's output for one sample, and how it was computed."""

    output: Tensor
    """The row of the output, as `ServedModel.output_rows` describes, on the CPU. Empty while `kept` says where it is."""
    model: str
    version: str
    queue_s: float
    """Seconds spent waiting in the leader, summed over the stages."""
    compute_s: float
    """Seconds of compute at the workers, summed over the stages."""
    transfer_s: float
    """Seconds on the links, both directions, summed over the stages."""
    attempts: int
    """1 + the number of times that a batch with this sample was sent again. Hedges do not count."""
    path: tuple[str, ...]
    """The world that computed each stage, in order."""
    batch_size: int = 1
    """Samples answered together by the last stage."""
    version_number: int = 1
    """See `ModelVersion.number`."""
    kept: KeptRow | None = None
    """Between leader and frontend: where to fetch the output."""


@dataclass(frozen=True)
class FailureSnapshot:
    """The last failure of a replica."""

    cause: str
    """`exit`, `hang`, `transport`, `error`, `left`, …"""
    detail: str
    at_unix_s: float


@dataclass(frozen=True)
class ReplicaSnapshot:
    """One slot of a stage, and the worker in it. The slot stays when its worker is replaced."""

    slot: int
    state: ReplicaState
    world: str | None = None
    """Name of the world of its link; None while the slot is absent."""
    generation: int = 0
    """Generation of that world; 0: there was none yet."""
    worker: str | None = None
    """The worker's name."""
    host: str | None = None
    """Name of the worker's machine or container."""
    pid: int | None = None
    """Process id on that host."""
    device: str | None = None
    in_flight: int = 0
    """Batches sent and not returned; at a frontend, of all leaders."""
    batches_done: int = 0
    """Batches returned in this generation; at a frontend, to all leaders."""
    last_failure: FailureSnapshot | None = None
    transport: Transport = "relay"
    """How others get its outputs."""


@dataclass(frozen=True)
class StageSnapshot:
    """One stage with its replicas, ordered by slot."""

    index: int
    blocks: tuple[str, ...]
    """The blocks of the model in this stage: "stem", "layer1.0", …"""
    replicas: tuple[ReplicaSnapshot, ...]
    rerouted: int = 0
    """Batches moved to another replica after a failure, at all leaders since they started."""

    @property
    def ready_replicas(self) -> int:
        """How many replicas are ready now."""
        return sum(replica.state == "ready" for replica in self.replicas)


@dataclass(frozen=True)
class LeaderSnapshot:
    """One leader, as a frontend sees it."""

    address: str
    """HOST:PORT of its join port."""
    state: Literal["ready", "not_ready", "draining", "unloaded", "unreachable"]
    name: str | None = None
    """None: it was never reached."""
    host: str | None = None
    pid: int | None = None
    version: str | None = None
    queue_depth: int = 0
    requests_in_flight: int = 0
    """Requests of all frontends that it has not answered."""
    uptime_s: float = 0.0


@dataclass(frozen=True)
class FrontendSnapshot:
    """One frontend, as a leader sees it."""

    name: str
    host: str
    pid: int
    connections: int = 0
    """Open HTTP connections."""
    requests_in_flight: int = 0
    transport: Transport = "relay"
    """How workers get its inputs."""


@dataclass(frozen=True)
class EdgeSnapshot:
    """One process fetches tensors of another."""

    consumer: str
    """Name of a frontend or worker."""
    producer: str
    """The same; HOST:PORT if the leader does not know its name."""
    transport: PairTransport
    received_bytes: int = 0
    """Bytes of tensors since the edge was opened."""
    fetch_s: float = 0.0
    """Mean time of recent transfers, in seconds."""


@dataclass(frozen=True)
class RolloutProgress:
    """How far one leader is with loading another version."""

    phase: Literal["reading", "loading", "ending"]
    """reading: the leader reads the weights and splits them; loading: workers load one after another; ending: the new version serves,
    and requests with the former one end."""
    worker: str | None = None
    """The worker that is loading now, or runs the self-test."""
    world: str | None = None
    """The world of its link."""
    passed: tuple[str, ...] = ()
    """The workers that have loaded the version and passed the self-test."""
    workers: int = 0
    """How many workers load it."""
    leader: str | None = None
    """The leader; set at a frontend."""


@dataclass(frozen=True)
class PipelineSnapshot:
    """State of the pipeline at one moment."""

    model: str
    version: str
    ready: bool
    draining: bool
    uptime_s: float
    queue_depth: int
    """Accepted requests that wait for a batch."""
    requests_in_flight: int
    """Accepted requests that are not answered."""
    stages: tuple[StageSnapshot, ...]
    spares: tuple[ReplicaSnapshot, ...] = ()
    """Workers that have loaded all stages and serve none. A spare is promoted when a slot becomes free."""
    version_number: int = 1
    version_loading: str | None = None
    """The version that workers are loading."""
    rollout: RolloutProgress | None = None
    """Of the leader that is loading a version; leaders load one after another."""
    unloaded: bool = False
    """An administrator has unloaded the model."""
    leader: str | None = None
    """The leader whose view of the stages this is."""
    leaders: tuple[LeaderSnapshot, ...] = ()
    frontends: tuple[FrontendSnapshot, ...] = ()
    edges: tuple[EdgeSnapshot, ...] = ()
    """At most 16 of each consumer."""
    state: ServiceState = field(init=False, default="not_ready")
    """Follows from the other fields."""
    reasons: tuple[str, ...] = field(init=False, default=())
    """Why the state is not `ready`, as parts of a sentence."""

    def __post_init__(self) -> None:
        state, reasons = _service_state(self)
        object.__setattr__(self, "state", state)
        object.__setattr__(self, "reasons", tuple(reasons))

    @property
    def missing_stages(self) -> tuple[int, ...]:
        """The stages without a ready replica."""
        return tuple(stage.index for stage in self.stages if not stage.ready_replicas)

    @property
    def redundancy(self) -> int:
        """Number of arbitrary failures that are survived: the fewest ready replicas of any stage, minus one; -1: not serving."""
        return min((stage.ready_replicas for stage in self.stages), default=0) - 1


def _service_state(snapshot: PipelineSnapshot) -> tuple[ServiceState, list[str]]:
    """The state of the service and its reasons. A stage has a spare replica if two are ready; a stage with one slot never had one."""
    if snapshot.draining:
        return "draining", ["the server is stopping"]
    if snapshot.unloaded and not snapshot.ready:  # ready: another leader has loaded it already
        return "unloaded", ["an administrator has unloaded the model"]
    reasons = [
        f"stage {stage.index} has no ready replica ({', '.join(replica.state for replica in stage.replicas) or 'none'})"
        for stage in snapshot.stages
        if not stage.ready_replicas
    ]
    if not snapshot.ready:
        return "not_ready", reasons or ["the pipeline is not complete"]
    reasons += [
        f"stage {stage.index} has 1 of {len(stage.replicas)} replicas"
        for stage in snapshot.stages
        if stage.ready_replicas == 1 < len(stage.replicas)
    ]
    reasons += [
        f"leader {leader.name or leader.address} is {leader.state.replace('_', ' ')}"
        for leader in snapshot.leaders
        if leader.state != "ready"
    ]
    return ("degraded" if reasons else "ready"), reasons


class Predictor(Protocol):
    """The pipeline for inference requests."""

    async def predict(self, row: Tensor, *, deadline_s: float, request_id: str, key: str = "") -> Prediction:
        """Compute one sample.

        Args:
            row: its inputs as `ServedModel.input_rows` describes, contiguous, on the CPU.
            key: samples with equal keys can be computed together; see `RowFormat.key`.
            deadline_s: deadline on the clock of `time.monotonic()`.
            request_id: identifies this request in the log.
        Raises:
            RequestRejected: a subclass says why (multiworld_serving.server.errors). The pipeline continues to serve.
        Cancelling withdraws the request: it is not sent again, and a late output is dropped.
        """
        ...

    def request(self) -> AbstractContextManager[None]:
        """Context of one request, from its first byte to its response. A stopping service waits for open requests.

        Raises:
            RequestRejected: on entry, if the service is stopping or the model is unloaded.
        """
        ...

    async def check(self, *, deadline_s: float, ahead: int) -> None:
        """Check whether a request would be refused now, before work is spent on it.

        Args:
            ahead: number of other requests that are still being prepared.
        Raises:
            RequestRejected: as `predict` would.
        """
        ...

    @property
    def version(self) -> ModelVersion:
        """The version that serves new requests."""
        ...


class Pipeline(Predictor, Protocol):
    """The pipeline for administration and status."""

    @property
    def ready(self) -> bool:
        """Every stage has a ready replica, the model is loaded, and the leader is not draining."""
        ...

    def snapshot(self) -> PipelineSnapshot:
        """State of the pipeline now. Cheap: may be called several times a second."""
        ...
