"""What the HTTP frontend knows of the pipeline behind it: ask for an answer, ask how it stands.

The leader implements `Pipeline`; the frontend, and its tests, know nothing else of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

ReplicaState = Literal["absent", "joining", "loading", "warming", "checking", "ready", "draining", "broken"]
"""A replica's way: its world forms, its weights are sent, it warms up, its canary is checked, it serves."""


@dataclass(frozen=True)
class ServedModel:
    """What the frontend must know of the model: its name, its classes and the picture it wants."""

    name: str
    """Such as "resnet50"."""
    version: str
    """Which weights it began with: "IMAGENET1K_V2", "random:0", or a file's stem and digest. `Predictor.version` serves now."""
    labels: tuple[str, ...]
    """One for each class, in the order of the model's output."""
    resize_size: int
    """Pixels: the image's shorter side is scaled to this."""
    crop_size: int
    """Pixels: side of the square that is cut from the middle; at most `resize_size`."""


class ModelVersion(NamedTuple):
    """One set of weights."""

    number: int
    """What clients of numbered versions call it: the first is 1. The same weights keep their number."""
    name: str
    """Such as "IMAGENET1K_V2"."""


@dataclass(frozen=True)
class Answer:
    """What the pipeline says of one image."""

    probabilities: Tensor
    """float32 [num_classes], on the CPU."""
    model: str
    version: str
    queue_s: float
    """Seconds spent waiting in the leader, all stages together."""
    compute_s: float
    """Seconds that the stages' workers computed."""
    transfer_s: float
    """Seconds on the links, both ways."""
    attempts: int
    """1, and one more for each time that a batch with this image had to be sent again."""
    path: tuple[str, ...]
    """The world that answered for each stage, in order."""
    batch_size: int = 1
    """How many images the last stage answered together."""
    version_number: int = 1
    """As in `ModelVersion`."""


@dataclass(frozen=True)
class FailureSnapshot:
    """How a replica failed last."""

    cause: str
    """`exit`, `hang`, `transport`, `error`, `left`, …"""
    detail: str
    at_unix_s: float


@dataclass(frozen=True)
class ReplicaSnapshot:
    """One slot of a stage. The slot stays when the worker in it is another."""

    slot: int
    state: ReplicaState
    world: str | None = None
    """Name of the world of its link; None while the slot is absent."""
    epoch: int = 0
    """Which incarnation of that world; 0 = there was none yet."""
    worker: str | None = None
    """The name by which the worker joined."""
    host: str | None = None
    """Name of the machine or container that it runs on, and there its process id."""
    pid: int | None = None
    device: str | None = None
    in_flight: int = 0
    """Batches sent to it and not answered."""
    batches_done: int = 0
    """Batches it answered in this epoch."""
    last_failure: FailureSnapshot | None = None


@dataclass(frozen=True)
class StageSnapshot:
    """One stage with its replicas, ordered by slot."""

    index: int
    blocks: tuple[str, ...]
    """The units of the model that it computes: "stem", "layer1.0", …"""
    replicas: tuple[ReplicaSnapshot, ...]

    @property
    def ready_replicas(self) -> int:
        """How many replicas serve now."""
        return sum(replica.state == "ready" for replica in self.replicas)


@dataclass(frozen=True)
class PipelineSnapshot:
    """How the pipeline stands at one moment."""

    model: str
    version: str
    ready: bool
    draining: bool
    uptime_s: float
    queue_depth: int
    """Requests accepted and not in flight."""
    requests_in_flight: int
    """Requests accepted and not answered."""
    stages: tuple[StageSnapshot, ...]
    spares: tuple[ReplicaSnapshot, ...] = ()
    """Workers that hold all stages ready and serve none: the next slot that falls empty is theirs."""
    version_number: int = 1
    version_loading: str | None = None
    """A version that is on its way to the workers."""
    unloaded: bool = False
    """An operator has taken the model out of service."""

    @property
    def missing_stages(self) -> tuple[int, ...]:
        """The stages without a ready replica."""
        return tuple(stage.index for stage in self.stages if not stage.ready_replicas)

    @property
    def redundancy(self) -> int:
        """Fewest ready replicas of any stage, minus one: how many failures can surely be survived; -1 = not serving."""
        return min((stage.ready_replicas for stage in self.stages), default=0) - 1


class Predictor(Protocol):
    """The pipeline, as inference sees it."""

    async def predict(self, image: Tensor, *, deadline_s: float, request_id: str) -> Answer:
        """Take one image through all stages.

        Args:
            image: uint8 [3, crop_size, crop_size], RGB, contiguous, on the CPU.
            deadline_s: the moment, on the clock of `time.monotonic()`, after which nobody waits for the answer.
            request_id: stands in the log lines that concern this request.
        Raises:
            RequestRefused: one of its leaves (server.errors); the pipeline goes on.
        Cancelling withdraws the request: it is not sent again, and an answer that still comes is dropped.
        """
        ...

    def request(self) -> AbstractContextManager[None]:
        """The time from the beginning of a request to its answer: a service that is told to stop meanwhile answers it first.

        Raises:
            RequestRefused: on entering: it stops already, or its model is unloaded.
        """
        ...

    async def check(self, *, deadline_s: float, ahead: int) -> None:
        """Find out before work is put into a request whether it would be refused now.

        Args:
            ahead: how many other requests are still being prepared.
        Raises:
            RequestRefused: as `predict` would.
        """
        ...

    @property
    def version(self) -> ModelVersion:
        """The version that new requests go to."""
        ...


class Pipeline(Predictor, Protocol):
    """The pipeline, as operators see it."""

    @property
    def ready(self) -> bool:
        """Every stage has a replica that passed its canary, and the leader is not draining."""
        ...

    def snapshot(self) -> PipelineSnapshot:
        """How the pipeline stands now. Cheap: it may be asked several times a second."""
        ...
