"""What goes into the model and comes out of it, in the words of the Open Inference Protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.predictor import ModelVersion, ServedModel

INPUT = "input"
OUTPUT = "probabilities"
_PLATFORM = "pytorch_multiworld"
_DATATYPES = ("UINT8", "FP32", "BYTES")


@dataclass(frozen=True)
class Signature:
    """The one input and the one output of the served model.

    Attributes:
        max_images: most images in one request.
    """

    model: ServedModel
    max_images: int

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """[3, S, S], without the batch dimension."""
        return (3, self.model.crop_size, self.model.crop_size)

    @property
    def image_values(self) -> int:
        """How many numbers one image has; as many bytes when they are UINT8."""
        return 3 * self.model.crop_size**2

    @property
    def num_classes(self) -> int:
        """Length of an answer's row."""
        return len(self.model.labels)

    def metadata(self, version: ModelVersion) -> dict[str, Any]:
        """The answer to GET /v2/models/{model}."""
        return {
            "name": self.model.name,
            "versions": [str(version.number)],
            "platform": _PLATFORM,
            "inputs": [{"name": INPUT, "datatype": "UINT8", "shape": [-1, *self.image_shape]}],
            "outputs": [{"name": OUTPUT, "datatype": "FP32", "shape": [-1, self.num_classes]}],
            "parameters": self._parameters(version),
        }

    def config(self, version: ModelVersion) -> dict[str, Any]:
        """The answer to GET /v2/models/{model}/config: the fields of Triton's `ModelConfig` that mean something here."""
        return {
            "name": self.model.name,
            "platform": _PLATFORM,
            "backend": "multiworld",
            "version_policy": {"specific": {"versions": [version.number]}},
            "max_batch_size": self.max_images,
            "input": [
                {
                    "name": INPUT,
                    "data_type": "TYPE_UINT8",
                    "format": "FORMAT_NCHW",
                    "dims": list(self.image_shape),
                    "optional": False,
                }
            ],
            "output": [{"name": OUTPUT, "data_type": "TYPE_FP32", "dims": [self.num_classes]}],
            "dynamic_batching": {},
            "parameters": {name: {"string_value": value} for name, value in self._parameters(version).items()},
        }

    def _parameters(self, version: ModelVersion) -> dict[str, str]:
        return {
            "weights": version.name,
            "input_datatypes": ",".join(_DATATYPES),
            "max_images": str(self.max_images),
        }
