"""Calibration for int8: inputs from the user, ranges of values for them, and how accurate the model is then."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, fx
from torch.ao.quantization.observer import HistogramObserver
from torch.nn import functional

from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.manifest import Int8Accuracy, Manifest
from multiworld_serving.models.bundle.nodes import BATCH, Node, Value
from multiworld_serving.models.bundle.stage import BundleStage, stage_specs
from multiworld_serving.models.errors import ExportError
from multiworld_serving.models.export.sources import call_function
from multiworld_serving.models.optimize.execution_modes import NO_INT8, has_fast_int8
from multiworld_serving.models.optimize.folding import FoldedStage
from multiworld_serving.models.optimize.fusing import Workload
from multiworld_serving.models.optimize.selection import deviation
from multiworld_serving.models.preprocessing import Preprocessing

LABELS = "labels"
"""Name of the classes of the rows among the arrays of a calibration set."""
_BATCH = 8
_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})
_LAYERS = ("aten.conv2d.default", "aten.linear.default")
_CPU = torch.device("cpu")
_TOLERANCE = 0.2
"""Largest `deviation` of int8 from float32 on the calibration set."""


@dataclass(frozen=True)
class Calibration:
    """Rows for calibration.

    Attributes:
        inputs: one tensor [rows, …] for each input of the bundle.
        classes: int64 [rows], the class of each row; None if it is not known.
    """

    inputs: tuple[Tensor, ...]
    classes: Tensor | None

    def batches(self) -> Iterator[tuple[Tensor, ...]]:
        """The inputs of a few rows at a time."""
        return zip(*(torch.split(each, _BATCH) for each in self.inputs), strict=True)


def load_calibration(
    source: str, names: Sequence[str], image: Preprocessing | None, labels: Sequence[str]
) -> Calibration:
    """Read a calibration set.

    Args:
        source: an .npz or .safetensors file with an array for each input; `file.py:function` or `package.module:function` that returns
            a dict of tensors, or a tensor for a single input; or, for models with image preprocessing, a folder of images. "labels" in
            the file or dict are the classes of the rows; in a folder of images each label has a folder.
        names: of the inputs.
        labels: of the classes.
    Raises:
        ExportError: it cannot be read, or an input is missing.
    """
    if Path(source).is_dir():
        return _from_folder(Path(source), image, labels)
    found = _tensors(source, names)
    if missing := [name for name in names if name not in found]:
        raise ExportError(f"--calibration {source} has {', '.join(found)[:200]}, but no {missing[0]!r}")
    inputs = tuple(found[name] for name in names)
    classes = found.get(LABELS)
    rows = {len(each) if each.dim() else 0 for each in (*inputs, *([] if classes is None else [classes]))}
    if len(rows) != 1 or min(rows) < 1:
        raise ExportError(f"--calibration {source}: expected the same number of rows in dimension 0 of all arrays")
    return Calibration(inputs, None if classes is None else classes.long().flatten())


def _tensors(source: str, names: Sequence[str]) -> dict[str, Tensor]:
    found: Any
    try:
        match Path(source).suffix:
            case ".npz":
                with np.load(source, allow_pickle=False) as arrays:
                    found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
            case ".safetensors":
                found = load_file(source)
            case _:
                found = call_function(source)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ExportError(f"--calibration {source} cannot be read: {error}") from error
    if isinstance(found, Tensor) and len(names) == 1:
        return {names[0]: found}
    if not isinstance(found, Mapping) or not all(isinstance(each, Tensor) for each in found.values()):
        raise ExportError(
            f"--calibration {source} returned {type(found).__name__}; expected a dict from input to tensor"
        )
    return dict(found)


def _from_folder(folder: Path, image: Preprocessing | None, labels: Sequence[str]) -> Calibration:
    from PIL import Image  # noqa: PLC0415 - other calibration sets do not need it
    from torchvision.transforms.v2 import functional as transforms  # noqa: PLC0415

    if image is None:
        raise ExportError(f"--calibration {folder} is a folder of images, but the model has no image preprocessing")
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in _SUFFIXES)
    if not files:
        raise ExportError(f"--calibration {folder} contains no images ({', '.join(sorted(_SUFFIXES))})")
    rows = []
    for file in files:
        try:
            with Image.open(file) as opened:
                pixels = transforms.pil_to_tensor(opened.convert("RGB"))
        except (OSError, ValueError) as error:
            raise ExportError(f"{file} is not an image: {error}") from error
        resized = transforms.resize(pixels, [image.resize_size], antialias=True)
        rows.append(transforms.center_crop(resized, [image.crop_size, image.crop_size]))
    known = {label: number for number, label in enumerate(labels)}
    classes = [known.get(file.parent.name) for file in files]
    complete = [each for each in classes if each is not None]
    return Calibration((torch.stack(rows),), torch.tensor(complete) if len(complete) == len(classes) else None)


def with_ranges(graph: Graph, weights: Mapping[str, Tensor], calibration: Calibration) -> Graph:
    """The graph with the ranges that its values have in calibration: of what layers take, and of what is added to their results.

    Ranges minimize the error of rounding to 8 bits, so that rare large values may be cut off.

    Raises:
        ExportError: the calibration set does not fit the inputs, a value is not finite, or there is nothing to calibrate.
    """
    observers = {node.name: HistogramObserver() for node in _observed(graph)}
    if not observers:
        raise ExportError("the model has no convolution or linear layer, so it cannot be computed in int8")
    for node, given in zip(graph.inputs, calibration.inputs, strict=True):
        dims = node.shape or ()
        fixed = all(dim == length for dim, length in zip(dims, given.shape, strict=False) if isinstance(dim, int))
        if given.dtype != node.dtype or given.dim() != len(dims) or not fixed:
            raise ExportError(
                f"--calibration: {node.name!r} is {given.dtype} {list(given.shape)}; expected {node.dtype} {list(dims)}"
            )
    module = graph.build(weights, _CPU)
    names = {made: node.name for made, node in zip(module.graph.nodes, graph.nodes, strict=False)}
    watching = _Watching(module, {made: observers[name] for made, name in names.items() if name in observers})
    with torch.no_grad():
        for batch in calibration.batches():
            watching.run(*batch)
    return replace(graph, ranges={name: _range(name, observer) for name, observer in observers.items()})


def _observed(graph: Graph) -> list[Node]:
    """Inputs of convolutions and linear layers, and what is added to images: float32 with one row for each row of the batch."""
    names: dict[str, None] = {}
    for node in graph.nodes:
        images = node.target == "aten.add.Tensor" and len(node.shape or ()) == 4
        if node.target in _LAYERS or images:
            operands = node.args[: 2 if images else 1]
            names.update(dict.fromkeys(each.name for each in operands if isinstance(each, Value)))
    return [
        node
        for node in graph.nodes
        if node.name in names
        and node.kind != "weight"
        and node.dtype == torch.float32
        and BATCH in (node.shape or ())[:1]
    ]


def _range(name: str, observer: HistogramObserver) -> tuple[float, float]:
    scale, zero = (float(each) for each in observer.calculate_qparams())
    least, most = -zero * scale, (255 - zero) * scale
    if not math.isfinite(most - least):
        raise ExportError(f"--calibration: the value {name!r} of the model becomes infinity or NaN")
    return min(least, 0.0), max(most, 0.0)


class _Watching(fx.Interpreter):
    """Shows the values of some nodes to their observers."""

    def __init__(self, module: fx.GraphModule, observers: Mapping[fx.Node, HistogramObserver]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._observers = observers

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if (observer := self._observers.get(n)) is not None:
            observer(value)
        return value


def int8_accuracy(
    graph: Graph, weights: Mapping[str, Tensor], manifest: Manifest, calibration: Calibration
) -> Int8Accuracy:
    """Compute the calibration set in float32 and, as workers do, in int8.

    Raises:
        ExportError: this machine cannot compute int8, or the model is too inaccurate in int8.
    """
    if not has_fast_int8(_CPU):
        raise ExportError(f"--calibration compares int8 with float32 on this machine, but {NO_INT8}")
    spec = stage_specs(manifest, [graph])[0]
    stage = BundleStage(spec, graph.build(weights, _CPU))
    first = spec.pack_input([each[:_BATCH] for each in calibration.inputs])
    workload = Workload(tuple(first.shape[1:]), _BATCH, (torch.get_num_threads(),))
    int8 = FoldedStage(stage, workload, fused=True, int8=True)
    found: list[tuple[Tensor, ...]] = []
    expected: list[tuple[Tensor, ...]] = []
    with torch.inference_mode():
        for batch in calibration.batches():
            rows = spec.pack_input(batch)
            found.append(spec.unpack_output(int8(rows)))
            expected.append(spec.unpack_output(stage(rows)))
    pairs = [
        (torch.cat(one).float(), torch.cat(two).float())
        for one, two in zip(zip(*found, strict=True), zip(*expected, strict=True), strict=True)
        if two[0].is_floating_point()
    ]
    if not pairs:
        raise ExportError("--calibration: the model returns no float tensor to compare")
    off = max(deviation(one, two, probabilities=spec.probabilities) for one, two in pairs)
    if not off <= _TOLERANCE:
        raise ExportError(
            f"the model is too inaccurate in int8: off by {off:.2g} where {_TOLERANCE:g} is allowed; calibrate with more rows of "
            "real data, or export it without --calibration"
        )
    cosines = [functional.cosine_similarity(one.flatten(1), two.flatten(1)).mean() for one, two in pairs]
    return _accuracy(pairs[0], float(min(cosines)), calibration)


def _accuracy(pair: tuple[Tensor, Tensor], cosine: float, calibration: Calibration) -> Int8Accuracy:
    rows = len(calibration.inputs[0])
    int8, float32 = (each.flatten(1).argmax(1) for each in pair)
    if pair[0].dim() != 2:
        return Int8Accuracy(rows, cosine, None, None)
    shares = None
    if calibration.classes is not None:
        shares = _share_equal(float32, calibration.classes), _share_equal(int8, calibration.classes)
    return Int8Accuracy(rows, cosine, _share_equal(int8, float32), shares)


def _share_equal(one: Tensor, other: Tensor) -> float:
    return float((one == other).float().mean())
