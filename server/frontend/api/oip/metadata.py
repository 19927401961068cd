"""Metadata of the served model as defined by the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multiworld_serving.common.service.errors import DrainingError, NotReadyError, RequestRejected, UnknownModelError
from multiworld_serving.common.service.model_versions import model_and_version
from multiworld_serving.common.service.predictor import ModelVersion, ServedModel
from multiworld_serving.common.service.snapshots import PipelineSnapshot
from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.server.frontend.api.oip.tensors import DATATYPES

_PLATFORM = "pytorch_multiworld"
_IMAGE_DATATYPES = ("UINT8", "FP32", "BYTES")


@dataclass(frozen=True)
class Signature:
    """The inputs and the outputs of the served model.

    Attributes:
        max_rows: maximum number of samples in one request.
        finite: inputs with NaN or infinity are rejected.
    """

    model: ServedModel
    max_rows: int
    finite: bool = False

    def check_served(self, model: str, version: str | None, now: ModelVersion) -> None:
        """Raise UnknownModelError unless this model, and this version of it if one is named, serves.

        Args:
            version: as the client wrote it; None = any.
            now: the version that serves.
        """
        name, number = model_and_version(model)
        if name != self.model.name or (name != model and number != now.number):
            raise UnknownModelError(f"Request for unknown model: {model[:64]!r}; the only model is {self.model.name!r}")
        if version is not None and version != str(now.number):
            raise UnknownModelError(
                f"the model {model!r} has no version {version[:64]!r}; the only version is {str(now.number)!r}, "
                f"with the weights {now.name}"
            )

    def metadata(self, version: ModelVersion) -> dict[str, Any]:
        """The response of GET /v2/models/{model}."""
        return {
            "name": self.model.name,
            "versions": [str(version.number)],
            "platform": _PLATFORM,
            "inputs": _described(self.model.inputs),
            "outputs": _described(self.model.outputs),
            "parameters": self._parameters(version),
        }

    def config(self, version: ModelVersion) -> dict[str, Any]:
        """The response of GET /v2/models/{model}/config: the fields of Triton's `ModelConfig` that apply here."""
        return {
            "name": self.model.name,
            "platform": _PLATFORM,
            "backend": "multiworld",
            "version_policy": {"specific": {"versions": [version.number]}},
            "max_batch_size": self.max_rows,
            "input": [
                _configured(each)
                | {"format": "FORMAT_NONE" if self.model.image is None else "FORMAT_NCHW", "optional": False}
                for each in self.model.inputs
            ],
            "output": [_configured(each) for each in self.model.outputs],
            "dynamic_batching": {},
            "parameters": {name: {"string_value": value} for name, value in self._parameters(version).items()},
        }

    def _parameters(self, version: ModelVersion) -> dict[str, str]:
        found = {"weights": version.name, "max_rows": str(self.max_rows)}
        if self.model.image is not None:
            found |= {"input_datatypes": ",".join(_IMAGE_DATATYPES)}
        return found | {
            f"dimension.{name}": f"{least}..{most}" for name, (least, most) in self.model.dimensions.items()
        }


def _described(tensors: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": each.name, "datatype": DATATYPES[each.dtype], "shape": [-1, *_dims(each)]} for each in tensors]


def _configured(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": f"TYPE_{DATATYPES[tensor.dtype]}", "dims": _dims(tensor)}


def _dims(tensor: TensorSpec) -> list[int]:
    """Without the batch dimension; -1 where the length varies."""
    return [dim if isinstance(dim, int) else -1 for dim in tensor.shape[1:]]


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


def readiness_error(snapshot: PipelineSnapshot) -> RequestRejected:
    """The error that says what is missing."""
    if snapshot.draining:
        return DrainingError("the server is stopping and accepts no new requests; use another one")
    if snapshot.unloaded:
        return NotReadyError("the model is unloaded; an administrator must load it first")
    return NotReadyError(f"not ready: {'; '.join(snapshot.reasons)}; wait for workers to join")
