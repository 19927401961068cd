"""Messages for joining: a worker sends a JoinRequest, the leader answers with a JoinOffer, and in that world sends StageAssignments."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from typing import Any, Self

import torch

from multiworld.texts import MAX_HOST_CHARS, MAX_NAME_CHARS, is_name, shown
from multiworld_serving.common.config.addresses import Address, parse_address
from multiworld_serving.common.wire.message import MAX_DIMS, WireError

WORLD_BACKEND = "tcp"
"""Backend of leader-worker worlds: point-to-point over TCP, where the worker opens every connection to one port of the leader."""

RELEASE = version("multiworld-serving")
"""Sent in join requests, for messages to people. Different releases work together if their protocols are equal."""
WORKER_PROTOCOL = 1
"""Version of all messages between leaders and workers: increase it with every change of them."""
FRONTEND_PROTOCOL = 2
"""Version of all frames between leaders and frontends: increase it with every change of them."""

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
_MAX_FIELDS_CHARS = 200
EDGE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""By name, the dtypes as which float32 tensors may travel between stages."""
_SHA256 = re.compile("[0-9a-f]{64}")
_MAX_MEMORY_MB = 1 << 40
MAX_PARTS = 64
"""Most parts in a JoinRequest."""
_PARTS = re.compile(f"([0-9a-f]{{16}}(,[0-9a-f]{{16}}){{0,{MAX_PARTS - 1}}})?")


def _check_edge(edge: str) -> None:
    """Raise WireError unless this is empty or HOST:PORT/INCARNATION."""
    if edge and not (is_name(edge, MAX_HOLDER_CHARS) and "/" in edge):
        raise WireError(f"edge is {edge!r:.60}; expected HOST:PORT/INCARNATION")


class _Json:
    """Mixin: a flat dataclass, encoded as a JSON object with exactly its fields."""

    @classmethod
    def _check_protocol(cls, data: Mapping[str, object]) -> None:
        """Raise WireError if the sender has another protocol. Called first, because other fields may differ then."""

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
        if not isinstance(data, dict):
            raise WireError(f"{cls.__name__} is not a JSON object")
        cls._check_protocol(data)
        if data.keys() != expected.keys():
            raise WireError(f"{cls.__name__}: {different_fields(data, expected)}; do both sides run the same release?")
        for name, kind in expected.items():
            if type(data[name]) is not kind:
                raise WireError(
                    f"{cls.__name__}: {name} is {data[name]!r:.60}; expected {getattr(kind, '__name__', kind)}"
                )
        return cls(**data)


def different_fields(found: Mapping[str, object], expected: Iterable[str]) -> str:
    """How the names of received fields differ from those of this release."""
    missing, unknown = sorted({*expected} - {*found}), sorted({*found} - {*expected})
    parts = [f"{what} {', '.join(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
    return f"fields {shown('; '.join(parts), _MAX_FIELDS_CHARS)}"


def _require_protocol(data: Mapping[str, object], kind: str, own: int, advice: str) -> None:
    """Raise WireError unless the join request `data` of a `kind` of process has the protocol `own`."""
    found = data.get("protocol")
    if type(found) is int and found == own:
        return
    older = "leader" if type(found) is int and found > own else kind
    theirs = f"release {data.get('release', 'unknown')!s:.20} with protocol {found!r:.20}"
    raise WireError(
        f"{kind} {data.get(kind)!r:.70} has {theirs}, and this leader release {RELEASE} with protocol {own}: upgrade this {older} "
        f"({advice})"
    )


@dataclass(frozen=True, slots=True)
class JoinRequest(_Json):
    """A worker asks for a world. A second request with the same `worker` name replaces the first worker.

    Attributes:
        host, pid: where the worker runs, for operators; `host` is its --advertise-host.
        edge: where others fetch its tensors, HOST:PORT/INCARNATION; empty if it uses no edges.
        parts: comma-separated `BundleStageSpec.part`s of the stages that other leaders have assigned to it, or else of those that it served
            last. A hint for placement.
        is_shared: whether other leaders have assigned `parts`.
        memory_mb: memory that is available for stages, in 10^6 bytes; 0: not known.
        protocol: must be the leader's.
        release: of the worker, for messages.
    Raises:
        WireError: a field is invalid. The fields appear in logs, metrics and the status.
    """

    worker: str
    device: str
    host: str
    pid: int
    parts: str = ""
    is_shared: bool = False
    edge: str = ""
    memory_mb: int = 0
    protocol: int = WORKER_PROTOCOL
    release: str = RELEASE

    @classmethod
    def _check_protocol(cls, data: Mapping[str, object]) -> None:
        _require_protocol(data, "worker", WORKER_PROTOCOL, "leaders and workers change together")

    def __post_init__(self) -> None:
        for field, limit in (("worker", MAX_NAME_CHARS), ("device", MAX_NAME_CHARS), ("host", MAX_HOST_CHARS)):
            if not is_name(getattr(self, field), limit):
                raise WireError(
                    f"JoinRequest: {field} is {getattr(self, field)!r:.60}; expected 1 to {limit} printable ASCII characters "
                    "without spaces"
                )
        if not 0 < self.pid < 1 << 32:
            raise WireError(f"JoinRequest: pid is {self.pid!r:.60}; expected a process id")
        if not 0 <= self.memory_mb <= _MAX_MEMORY_MB:
            raise WireError(f"JoinRequest: memory_mb is {self.memory_mb!r:.60}; expected 0 to {_MAX_MEMORY_MB}")
        _check_edge(self.edge)
        if not _PARTS.fullmatch(self.parts):
            raise WireError(f"JoinRequest: parts is {self.parts!r:.60}; expected at most {MAX_PARTS} parts of stages")


@dataclass(frozen=True, slots=True)
class FrontendJoinRequest(_Json):
    """A frontend asks for a world. A second request with the same `frontend` name replaces the first frontend.

    Attributes:
        edge: where others fetch its tensors, HOST:PORT/INCARNATION; empty if it uses no edges.
        protocol: must be the leader's.
        release: of the frontend, for messages.
    Raises:
        WireError: a field is invalid. The fields appear in logs, metrics and the status.
    """

    frontend: str
    host: str
    pid: int
    edge: str = ""
    protocol: int = FRONTEND_PROTOCOL
    release: str = RELEASE

    @classmethod
    def _check_protocol(cls, data: Mapping[str, object]) -> None:
        order = "upgrade one leader first, then the frontends, then the other leaders"
        _require_protocol(data, "frontend", FRONTEND_PROTOCOL, order)

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

    def joins_at(self, asked: Address) -> Address:
        """Address to join at, if the request was sent to `asked`. Raises WireError."""
        if not self.address:
            return asked
        try:
            return parse_address(self.address)
        except ValueError as error:
            raise WireError(f"JoinOffer: address is {self.address!r:.60}; expected HOST:PORT") from error


@dataclass(frozen=True, slots=True)
class StageAssignment(_Json):
    """A stage that the worker must load and serve. Sent first in a new world, once per stage. Later assignments bring stages of other
    versions of the model; they are kept next to the others until UNLOAD.

    Attributes:
        spec: a models.BundleStageSpec as JSON.
        weights_bytes: length of the safetensors file that follows in WEIGHTS messages, if the worker asks for it with FETCH_WEIGHTS.
        weights_sha256: hash of this file in hexadecimal digits.
        input_shape: shape of one sample of this stage's input, as "3x224x224".
        window: most batches that the leader keeps in flight.
        version: the leader's number of this model version; batches refer to it.
        precision, optimize, edge_dtype: see models.Tuning.
        tuning_ms: longest time for measuring execution modes.
    Raises:
        WireError: a number is out of bounds, or `input_shape` is not the shape of a sample.
    """

    spec: str
    weights_bytes: int
    weights_sha256: str
    input_shape: str
    max_batch_size: int
    window: int
    version: int
    precision: str = "float32"
    optimize: str = "none"
    tuning_ms: int = 0
    edge_dtype: str = "float32"

    def __post_init__(self) -> None:
        for field, (least, most) in _ASSIGNMENT_BOUNDS.items():
            if not least <= getattr(self, field) <= most:
                raise WireError(f"StageAssignment: {field} is {getattr(self, field)!r:.60}; expected {least} to {most}")
        if not _SHA256.fullmatch(self.weights_sha256):
            raise WireError(f"StageAssignment: weights_sha256 is {self.weights_sha256!r:.60}; expected a SHA-256 hash")
        if self.edge_dtype not in EDGE_DTYPES:
            raise WireError(
                f"StageAssignment: edge_dtype is {self.edge_dtype!r:.60}; expected one of {', '.join(EDGE_DTYPES)}"
            )
        shape = self.sample_shape
        if min(shape) < 1 or len(shape) >= MAX_DIMS or self.max_batch_size * math.prod(shape) > _MAX_BATCH_ELEMENTS:
            raise WireError(
                f"StageAssignment: input_shape is {self.input_shape!r:.60}; expected up to {MAX_DIMS - 1} sizes from 1, and at most "
                f"{_MAX_BATCH_ELEMENTS} numbers in a batch"
            )

    @property
    def digest(self) -> str:
        """Hash of everything that the loaded stage depends on: assignments with equal digests can share one stage.

        It includes the largest batch size, for which execution modes and CUDA graphs are made, but not the time for measuring.
        """
        loading = (self.spec, self.input_shape, self.max_batch_size, self.precision, self.optimize, self.weights_sha256)
        return hashlib.sha256(json.dumps((*loading, self.edge_dtype)).encode()).hexdigest()

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """dtype as which a tensor of this dtype travels between stages."""
        return EDGE_DTYPES[self.edge_dtype] if dtype == torch.float32 else dtype

    @property
    def sample_shape(self) -> tuple[int, ...]:
        try:
            return tuple(int(dim) for dim in self.input_shape.split("x"))
        except ValueError as error:
            raise WireError(f"StageAssignment: input_shape is {self.input_shape!r:.60}, not a shape") from error
