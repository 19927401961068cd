"""Description of a stage, from which a worker builds it: validated, and sent as JSON."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multiworld_serving.models.architectures import MODEL_NAMES, architecture
from multiworld_serving.models.errors import PreprocessingError, StageError
from multiworld_serving.models.preprocessing import check_channels, check_images
from multiworld_serving.models.weights.state_dict import MAX_CLASSES


@dataclass(frozen=True)
class StageSpec:
    """A contiguous range of blocks of a model, without weights.

    Raises:
        StageError: no partition of this model has such a stage. So every existing spec can be built.
    """

    model: str
    """As in `MODEL_NAMES`."""
    version: str
    """Version of its weights, as in `LoadedModel.version`."""
    num_classes: int
    """Number of classes of the last layer."""
    index: int
    """Index of the stage in the pipeline, from 0."""
    num_stages: int
    """Number of stages in the pipeline."""
    first_block: int
    """Index in `block_names(model)` of the first block of this stage."""
    end_block: int
    """Index of the block after the last one of this stage."""
    mean: tuple[float, float, float]
    """Mean of each channel (R, G, B) of images in 0..1, for normalisation in the first stage."""
    std: tuple[float, float, float]
    """Standard deviation of each channel, likewise."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or self.model not in MODEL_NAMES:
            raise StageError(f"stage of model {self.model!r}; expected one of {', '.join(MODEL_NAMES)}")
        if not isinstance(self.version, str) or not self.version:
            raise StageError(f"stage of version {self.version!r}; expected the version of the weights as text")
        num_blocks = len(architecture(self.model).blocks)
        self._check_int("num_classes", 1, MAX_CLASSES)
        self._check_int("num_stages", 1, num_blocks)
        self._check_int("index", 0, self.num_stages - 1)
        # Each stage before and after this one has at least one block; the first and last stages reach the model's ends.
        stages_after = self.num_stages - self.index - 1
        latest_first = num_blocks - stages_after - 1 if self.index else 0
        self._check_int("first_block", self.index, latest_first)
        earliest_end = self.first_block + 1 if stages_after else num_blocks
        self._check_int("end_block", earliest_end, num_blocks - stages_after)
        try:
            object.__setattr__(self, "mean", check_channels(self.mean, "mean"))
            object.__setattr__(self, "std", check_channels(self.std, "std", positive=True))
        except PreprocessingError as error:
            raise StageError(f"stage {self.index} of {self.model}: {error}") from error

    @property
    def is_first(self) -> bool:
        """Whether the input is images."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the output is probabilities."""
        return self.index == self.num_stages - 1

    @property
    def probabilities(self) -> bool:
        """Whether the output is probabilities."""
        return self.is_last

    @property
    def input_dtype(self) -> torch.dtype:
        """See `stages.stage_input_dtype`."""
        return torch.uint8 if self.is_first else torch.float32

    @property
    def input_varies(self) -> bool:
        """Whether rows of the input have different lengths."""
        return False

    def example(self, count: int, sample_shape: tuple[int, ...]) -> Tensor:
        """Rows of zeros."""
        return torch.zeros((count, *sample_shape), dtype=self.input_dtype)

    def unpack_input(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the input: the only one. Raises PreprocessingError if they should be images and are not."""
        if self.is_first:
            check_images(rows)
        return (rows,)

    def pack_input(self, tensors: Sequence[Tensor]) -> Tensor:
        """The inverse of `unpack_input`."""
        return tensors[0]

    def pack_output(self, tensors: Sequence[Tensor]) -> Tensor:
        """The inverse of `unpack_output`."""
        return tensors[0]

    def unpack_output(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the output: the only one."""
        return (rows,)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of its blocks."""
        return architecture(self.model).blocks[self.first_block : self.end_block]

    @property
    def part(self) -> str:
        """16 hexadecimal digits that identify this part of the model, whichever version of the weights it has."""
        return hashlib.sha256(dataclasses.replace(self, version="any").to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """One JSON object, which `from_json` reads back into an equal spec."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "StageSpec":
        """The spec in `text`.

        Raises:
            StageError: not a JSON object with exactly the fields of a spec, or their values are out of range.
        """
        try:
            data: Any = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise StageError(
                f"stage description is not JSON ({error}); expected what StageSpec.to_json writes"
            ) from error
        if not isinstance(data, dict):
            raise StageError(f"stage description is a JSON {type(data).__name__}; expected an object")
        expected = {field.name for field in dataclasses.fields(cls)}
        if data.keys() != expected:
            missing, unknown = sorted(expected - data.keys()), sorted(data.keys() - expected)
            raise StageError(
                f"stage description lacks {missing} and has unknown {unknown}; expected exactly {sorted(expected)} "
                "(do leader and worker run the same release?)"
            )
        return cls(**data)

    def _check_int(self, field: str, low: int, high: int) -> None:
        value: Any = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            where = f"stage of {self.model}" if field in ("num_classes", "num_stages") else "stage of this pipeline"
            raise StageError(f"{where}: {field} is {value!r}; expected a whole number from {low} to {high}")
