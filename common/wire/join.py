"""Messages for joining: a worker sends a JoinRequest, the leader answers with a JoinOffer, and in that world sends StageAssignments."""

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from multiworld.texts import MAX_HOST_CHARS, MAX_NAME_CHARS, is_name
from multiworld_serving.common.wire.message import MAX_DIMS, WireError

WORLD_BACKEND = "tcp"
"""Backend of leader-worker worlds: point-to-point over TCP, where the worker opens every connection to one port of the leader."""

_MAX_WAIT_MS = 100_000_000
"""Longest quarantine of a failing worker, a little more than a day."""
_ASSIGNMENT_BOUNDS = {
    "weights_bytes": (1, 4 << 30),
    "max_batch_size": (1, 1024),
    "window": (1, 64),
    "version": (1, (1 << 32) - 1),
    "tuning_ms": (0, 3_600_000),
}
"""Smallest and largest values of a StageAssignment; at least as wide as the leader's settings."""
MAX_HOLDER_CHARS = MAX_HOST_CHARS + MAX_NAME_CHARS
_MAX_BATCH_ELEMENTS = 1 << 34


def _check_edge(edge: str) -> None:
    """Raise WireError unless this is empty or HOST:PORT/INCARNATION."""
    if edge and not (is_name(edge, MAX_HOLDER_CHARS) and "/" in edge):
        raise WireError(f"edge is {edge!r:.60}; expected HOST:PORT/INCARNATION")


class _Json:
    """Mixin: a flat dataclass, encoded as a JSON object with exactly its fields."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]  # the mixin's users are dataclasses

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Decode. Raises WireError unless the text is an object with exactly these fields, each of the declared type."""
        try:
            data: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WireError(f"{cls.__name__} is not JSON: {error}") from error
        expected = {field.name: field.type for field in fields(cls)}  # type: ignore[arg-type]  # likewise
        if not isinstance(data, dict) or data.keys() != expected.keys():
            raise WireError(f"{cls.__name__}: expected {sorted(expected)}; do leader and worker run the same release?")
        for name, kind in expected.items():
            if type(data[name]) is not kind:
                raise WireError(
                    f"{cls.__name__}: {name} is {data[name]!r:.60}; expected {getattr(kind, '__name__', kind)}"
                )
        return cls(**data)


@dataclass(frozen=True, slots=True)
class JoinRequest(_Json):
    """A worker asks for a world. A second request with the same `worker` name replaces the first worker.

    Attributes:
        host, pid: where the worker runs, for operators; `host` is its --advertise-host.
        edge: where others fetch its tensors, HOST:PORT/INCARNATION; empty if it uses no edges.
    Raises:
        WireError: a field is invalid. The fields appear in logs, metrics and the status.
    """

    worker: str
    device: str
    host: str
    pid: int
    edge: str = ""

    def __post_init__(self) -> None:
        for field, limit in (("worker", MAX_NAME_CHARS), ("device", MAX_NAME_CHARS), ("host", MAX_HOST_CHARS)):
            if not is_name(getattr(self, field), limit):
                raise WireError(
                    f"JoinRequest: {field} is {getattr(self, field)!r:.60}; expected 1 to {limit} printable ASCII characters "
                    "without spaces"
                )
        if not 0 < self.pid < 1 << 32:
            raise WireError(f"JoinRequest: pid is {self.pid!r:.60}; expected a process id")
        _check_edge(self.edge)


@dataclass(frozen=True, slots=True)
class FrontendJoinRequest(_Json):
    """A frontend asks for a world. A second request with the same `frontend` name replaces the first frontend.

    Attributes:
        release: must be the leader's, because the frames between them have no versions.
        edge: where others fetch its tensors, HOST:PORT/INCARNATION; empty if it uses no edges.
    Raises:
        WireError: a field is invalid. The fields appear in logs, metrics and the status.
    """

    frontend: str
    host: str
    pid: int
    release: str
    edge: str = ""

    def __post_init__(self) -> None:
        for field, limit in (("frontend", MAX_NAME_CHARS), ("host", MAX_HOST_CHARS), ("release", MAX_NAME_CHARS)):
            if not is_name(getattr(self, field), limit):
                raise WireError(f"FrontendJoinRequest: {field} is {getattr(self, field)!r:.60}; expected a name")
        _check_edge(self.edge)


@dataclass(frozen=True, slots=True)
class EdgeJoinRequest(_Json):
    """A consumer asks a producer for an edge.

    Attributes:
        consumer: its name, for the producer's log.
        incarnation: of the producer that has the tensors.
    Raises:
        WireError: a field is invalid.
    """

    consumer: str
    incarnation: str

    def __post_init__(self) -> None:
        for field in ("consumer", "incarnation"):
            if not is_name(getattr(self, field)):
                raise WireError(f"EdgeJoinRequest: {field} is {getattr(self, field)!r:.60}; expected a name")


@dataclass(frozen=True, slots=True)
class JoinOffer(_Json):
    """The world to join, as rank 1 of 2.

    Attributes:
        world: empty if there is none now. Ask again after `wait_ms`, not before.
        address: HOST:PORT to join at; empty for the address that the request was sent to.
    Raises:
        WireError: the world's name is invalid, or `wait_ms` is out of range.
    """

    world: str
    generation: int
    wait_ms: int = 0
    address: str = ""

    def __post_init__(self) -> None:
        if self.world and not is_name(self.world):
            raise WireError(
                f"JoinOffer: world is {self.world!r:.60}; expected at most {MAX_NAME_CHARS} printable ASCII characters without spaces"
            )
        if not 0 <= self.wait_ms <= _MAX_WAIT_MS:
            raise WireError(f"JoinOffer: wait_ms is {self.wait_ms!r:.60}; expected 0 to {_MAX_WAIT_MS}")


@dataclass(frozen=True, slots=True)
class StageAssignment(_Json):
    """A stage that the worker must load and serve. Sent first in a new world, once per stage. Later assignments bring stages of other
    versions of the model; they are kept next to the others until UNLOAD.

    Attributes:
        spec: a models.StageSpec as JSON.
        weights_bytes: length of the safetensors file that follows in WEIGHTS messages.
        input_shape: shape of one sample of this stage's input, as "3x224x224".
        window: most batches that the leader keeps in flight.
        version: the leader's number of this model version; batches refer to it.
        precision, optimize: see models.Tuning.
        tuning_ms: longest time for measuring execution modes.
    Raises:
        WireError: a number is out of bounds, or `input_shape` is not the shape of a sample.
    """

    spec: str
    weights_bytes: int
    input_shape: str
    max_batch_size: int
    window: int
    version: int
    precision: str = "float32"
    optimize: str = "none"
    tuning_ms: int = 0

    def __post_init__(self) -> None:
        for field, (least, most) in _ASSIGNMENT_BOUNDS.items():
            if not least <= getattr(self, field) <= most:
                raise WireError(f"StageAssignment: {field} is {getattr(self, field)!r:.60}; expected {least} to {most}")
        shape = self.sample_shape
        if min(shape) < 1 or len(shape) >= MAX_DIMS or self.max_batch_size * math.prod(shape) > _MAX_BATCH_ELEMENTS:
            raise WireError(
                f"StageAssignment: input_shape is {self.input_shape!r:.60}; expected up to {MAX_DIMS - 1} sizes from 1, and at most "
                f"{_MAX_BATCH_ELEMENTS} numbers in a batch"
            )

    @property
    def sample_shape(self) -> tuple[int, ...]:
        try:
            return tuple(int(dim) for dim in self.input_shape.split("x"))
        except ValueError as error:
            raise WireError(f"StageAssignment: input_shape is {self.input_shape!r:.60}, not a shape") from error
