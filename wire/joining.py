"""How a worker comes to a world: it asks the leader, and the leader offers it one; in that world it is told its stage."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from wire.message import WireError

WORLD_BACKEND = "lines"
"""Of the worlds of leader and worker: they send messages, and the worker opens every connection, to one port of the leader."""


class _Json:
    """A flat dataclass that travels as a JSON object of exactly its fields."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]  # the mixin's users are dataclasses

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises WireError unless the text is an object with exactly these fields, each of its type."""
        try:
            data: Any = json.loads(text)
        except ValueError as error:
            raise WireError(f"{cls.__name__} is not JSON: {error}") from error
        expected = {field.name: field.type for field in fields(cls)}  # type: ignore[arg-type]  # likewise
        if not isinstance(data, dict) or data.keys() != expected.keys():
            raise WireError(f"{cls.__name__}: expected {sorted(expected)}; do leader and worker run the same release?")
        for name, kind in expected.items():
            if type(data[name]) is not kind:
                raise WireError(f"{cls.__name__}: {name} is {data[name]!r}")
        return cls(**data)


@dataclass(frozen=True, slots=True)
class JoinRequest(_Json):
    """A worker looks for work. Its `worker` name is its own: who joins again under it replaces its former self.

    Attributes:
        host, pid: where it runs, for whoever looks for it; the host under the name that it wants to be known by.
    """

    worker: str
    device: str
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class JoinOffer(_Json):
    """The world to join, as rank 1 of 2.

    Attributes:
        world: empty when there is none now; ask again after `wait_ms`, and not before.
        address: HOST:PORT to join it at; empty for the one where the question was asked.
    """

    world: str
    epoch: int
    wait_ms: int = 0
    address: str = ""


@dataclass(frozen=True, slots=True)
class StageOrder(_Json):
    """What the worker is to hold ready and serve: the first message in a new world, one for each stage. Later ones bring the stages of
    another version of the model; they are held beside the others until a DROP.

    Attributes:
        spec: a models.StageSpec as JSON.
        weights_bytes: length of the safetensors file that follows in pieces.
        input_shape: of one row of this stage's input, as "3x224x224".
        version: the leader's number for this version of the model, which batches name.
        precision, optimize: as in models.Tuning, and tuning_ms how long measuring may take.
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

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Raises WireError."""
        try:
            return tuple(int(dim) for dim in self.input_shape.split("x"))
        except ValueError as error:
            raise WireError(f"not a shape: {self.input_shape!r}") from error
