"""Metadata of the served model as defined by the Open Inference Protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multiworld_serving.server.predictor import ModelVersion, PipelineSnapshot, ServedModel
from multiworld_serving.server.readiness import readiness_error

INPUT = "input"
OUTPUT = "probabilities"
_PLATFORM = "pytorch_multiworld"
_DATATYPES = ("UINT8", "FP32", "BYTES")


@dataclass(frozen=True)
class Signature:
    """The input and the output of the served model.

    Attributes:
        max_images: maximum number of images in one request.
    """

    model: ServedModel
    max_images: int

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """[3, S, S], without the batch dimension."""
        return (3, self.model.crop_size, self.model.crop_size)

    @property
    def image_values(self) -> int:
        """Number of values of one image, and its size in bytes as UINT8."""
        return 3 * self.model.crop_size**2

    @property
    def num_classes(self) -> int:
        """Number of probabilities per image."""
        return len(self.model.labels)

    def metadata(self, version: ModelVersion) -> dict[str, Any]:
        """The response of GET /v2/models/{model}."""
        return {
            "name": self.model.name,
            "versions": [str(version.number)],
            "platform": _PLATFORM,
            "inputs": [{"name": INPUT, "datatype": "UINT8", "shape": [-1, *self.image_shape]}],
            "outputs": [{"name": OUTPUT, "datatype": "FP32", "shape": [-1, self.num_classes]}],
            "parameters": self._parameters(version),
        }

    def config(self, version: ModelVersion) -> dict[str, Any]:
        """The response of GET /v2/models/{model}/config: the fields of Triton's `ModelConfig` that apply here."""
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


def repository_index(snapshot: PipelineSnapshot, *, only_ready: bool = False) -> list[dict[str, str]]:
    """The state of the current version, and of the version being loaded, if any."""
    here = {"name": snapshot.model, "version": str(snapshot.version_number)}
    if snapshot.ready:
        versions = [here | {"state": "READY", "reason": ""}]
    else:
        reason = "unloaded" if snapshot.unloaded else readiness_error(snapshot).detail
        versions = [here | {"state": "UNAVAILABLE", "reason": reason}]
    if snapshot.version_loading is not None:
        versions.append({"name": snapshot.model, "version": "", "state": "LOADING", "reason": snapshot.version_loading})
    return [version for version in versions if version["state"] == "READY" or not only_ready]
