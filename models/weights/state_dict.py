"""Loads a checkpoint's tensors into a model, and explains mismatches."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from multiworld_serving.models.architectures import MODEL_NAMES, meta_model
from multiworld_serving.models.errors import ArchitectureError, WeightsError

MAX_CLASSES = 100_000
"""Bounds the size of the last layer; ImageNet-21k has 21,841 classes."""
_COUNTER = "num_batches_tracked"  # BatchNorm's; unused in eval mode, and missing in old checkpoints


def load_into(name: str, tensors: Mapping[str, Tensor], origin: str) -> nn.Module:
    """Model `name` with these weights: float32, CPU, eval mode, without gradients. Copies the tensors.

    The number of classes is that of `fc.weight`.

    Args:
        tensors: by torchvision's names; any floating dtype.
        origin: where they come from, for messages.
    Raises:
        ArchitectureError: they belong to another architecture; names it if it is known.
        WeightsError: they are unusable (not floating point, NaN or infinity).
    """
    found = {key: tuple(tensor.shape) for key, tensor in tensors.items() if not key.endswith(_COUNTER)}
    num_classes = num_classes_of(found)
    expected = shapes_of(meta_model(name, num_classes or 1000))
    if found != expected:
        raise ArchitectureError(_mismatch(name, found, expected, origin))
    _check_values({key: tensors[key] for key in found}, origin)
    model = copy.deepcopy(meta_model(name, num_classes or 1000)).to_empty(device="cpu")
    counters = {key: torch.zeros((), dtype=torch.int64) for key in model.state_dict() if key.endswith(_COUNTER)}
    counters |= {key: tensors[key] for key in counters.keys() & tensors.keys()}
    model.load_state_dict({key: tensors[key] for key in found} | counters, strict=True)
    return model


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every weight that a checkpoint must have, by name."""
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items() if not key.endswith(_COUNTER)}


def num_classes_of(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Number of classes by the last layer's shape; None if there is no such layer."""
    shape = shapes.get("fc.weight", ())
    return shape[0] if len(shape) == 2 and 1 <= shape[0] <= MAX_CLASSES else None


def _check_values(tensors: Mapping[str, Tensor], origin: str) -> None:
    for key, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise WeightsError(f"{origin}: {key} is {tensor.dtype}; expected floating point, not a quantised model")
        if not bool(torch.isfinite(tensor).all()):
            raise WeightsError(f"{origin}: {key} contains NaN or infinity; every answer would be NaN. Train it again")


def _mismatch(
    name: str, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], origin: str
) -> str:
    look_alike = _look_alike(name, found)
    if look_alike is not None:
        return f"the weights in {origin} are {look_alike}'s, not {name}'s; choose --model {look_alike} or other weights"
    details = "; ".join(_differences(found, expected))
    guess = ""
    if found.keys() == expected.keys():
        guess = " (same layers in other sizes: a ResNeXt, a wide ResNet, or another input than RGB?)"
    return f"the weights in {origin} do not fit {name}{guess}: {details}; expected torchvision's {name}"


def _look_alike(name: str, found: Mapping[str, tuple[int, ...]]) -> str | None:
    num_classes = num_classes_of(found)
    if num_classes is None:
        return None
    for other in MODEL_NAMES:
        if other != name and shapes_of(meta_model(other, num_classes)) == found:
            return other
    return None


def _differences(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What was found and what was expected, one example of each kind of difference."""
    missing = [key for key in expected if key not in found]
    surplus = [key for key in found if key not in expected]
    other = [key for key in expected if key in found and found[key] != expected[key]]
    parts = [f"{len(found)} tensors found, {len(expected)} expected"]
    if missing:
        parts.append(f"{len(missing)} missing (first {missing[0]})")
    if surplus:
        parts.append(f"{len(surplus)} unknown (first {surplus[0][:80]})")
    if other:
        key = other[0]
        parts.append(f"{key} is {list(found[key])} instead of {list(expected[key])}")
    return parts
