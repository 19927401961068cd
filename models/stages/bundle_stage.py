"""A part of a bundle as a stage whose rows are objects: dicts of tensors by name.

Between the parts of a bundle, a row is the packed row of the bundle with the lengths of its dimensions and the other keys of the dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.models.bundle.nodes import DTYPES
from multiworld_serving.models.bundle.stage import BundleStageSpec
from multiworld_serving.models.stages.api import InvalidInput, Request
from multiworld_serving.models.stages.objects import ObjectError
from multiworld_serving.models.stages.stage import ObjectStage

Lengths = dict[str, int]


class _Row(NamedTuple):
    """A row of a batch.

    Attributes:
        tensors: of all of its samples, with the batch dimension: the inputs, or one packed tensor behind another part of the bundle.
        lengths: of its dimensions that vary.
        others: the keys of the object that are no inputs.
        is_single: whether the object has no dimension for samples.
    """

    tensors: tuple[Tensor, ...]
    lengths: Lengths
    others: dict[str, Any]
    is_single: bool


class BundleObjects(ObjectStage):
    """Computes a part of a bundle.

    Args:
        module: computes packed rows, on its device.
        is_first: whether its rows are requests of clients.
    """

    def __init__(
        self,
        spec: BundleStageSpec,
        module: Callable[[Tensor], Tensor],
        device: torch.device,
        pad: Mapping[str, float],
        max_batch_size: int,
        *,
        is_first: bool,
    ) -> None:
        self._spec = spec
        self.module = module
        self._device = device
        self._pad = pad
        self._max_batch_size = max_batch_size
        self._is_first = is_first

    def results(self, objects: list[Any]) -> Sequence[Any]:
        """Compute rows whose inputs have equal lengths together, after padding."""
        found: list[Any] = [None] * len(objects)
        groups: dict[tuple[object, ...], list[tuple[int, _Row]]] = {}
        for index, each in enumerate(objects):
            try:
                row = self._row(each)
            except ObjectError as error:
                if not self._is_first:
                    raise
                found[index] = InvalidInput(str(error))
                continue
            padded = bool(self._pad) and self._spec.is_first
            key = () if padded else tuple(tensor.shape[1:] for tensor in row.tensors)
            groups.setdefault(key, []).append((index, row))
        for group in groups.values():
            for (index, row), rows in zip(group, self._computed([row for _, row in group]), strict=True):
                found[index] = self._object(row, rows)
        return found

    def _computed(self, rows: list[_Row]) -> list[Tensor]:
        """The packed output rows of each row."""
        tensors = _padded(rows, self._spec.inputs, self._pad) if self._spec.is_first else [row.tensors for row in rows]
        counts = [len(each[0]) for each in tensors]
        if not sum(counts):
            empty = self._spec.output_rows
            return [torch.empty((0, *empty.dims), dtype=empty.dtype) for _ in rows]
        joined = [torch.cat(parts) for parts in zip(*tensors, strict=True)]
        packed = self._spec.input_rows.pack(joined) if self._spec.is_first else joined[0]
        parts = [self.module(each.to(self._device)).cpu() for each in torch.split(packed, self._max_batch_size)]
        return list(torch.split(torch.cat(parts), counts))

    def _row(self, given: Any) -> _Row:
        """Raises ObjectError for an object without the inputs."""
        if not self._spec.is_first:
            rows, *described = given
            return _Row((rows,), *described)
        values = given
        if isinstance(given, Request):
            values = given.inputs or given.json()
        if not isinstance(values, dict):
            raise ObjectError(f"a row is {type(values).__name__}; expected a dict with {self._inputs}")
        inputs = self._spec.inputs
        if missing := [each.name for each in inputs if each.name not in values]:
            raise ObjectError(f"a row has {list(values)!s:.100} and not {missing[0]!r}; expected {self._inputs}")
        tensors = [_tensor(values[each.name], each) for each in inputs]
        is_single = tensors[0].dim() < len(inputs[0].shape)
        if is_single:
            tensors = [each[None] for each in tensors]
        names = {each.name for each in inputs}
        lengths: Lengths = {}
        for spec, tensor in zip(inputs, tensors, strict=True):
            if tensor.dim() != len(spec.shape) or len(tensor) != len(tensors[0]):
                raise ObjectError(f"{spec.name!r} has the shape {list(tensor.shape)}; expected {self._inputs}")
            for dim, length in zip(spec.shape[1:], tensor.shape[1:], strict=True):
                if isinstance(dim, str) and lengths.setdefault(dim, length) != length:
                    raise ObjectError(f"{spec.name!r}: {dim} has the lengths {lengths[dim]} and {length}")
                least, most = self._spec.dimensions[dim] if isinstance(dim, str) else (dim, dim)
                if not (least or 0) <= length <= (most or length):
                    raise ObjectError(f"{spec.name!r} has the shape {list(tensor.shape[1:])}; expected {self._inputs}")
        others = {name: value for name, value in values.items() if name not in names}
        return _Row(tuple(tensors), lengths, others, is_single)

    def _object(self, row: _Row, rows: Tensor) -> Any:
        if not self._spec.is_last:
            return [rows, row.lengths, row.others, row.is_single]
        found = dict(row.others)
        outputs = self._spec.output_rows.unpack(rows) if len(rows) else ()
        for spec, tensor in zip(self._spec.outputs, outputs, strict=bool(outputs)):
            for place, dim in enumerate(spec.shape):
                if isinstance(dim, str) and dim in row.lengths:
                    tensor = tensor.narrow(place, 0, min(row.lengths[dim], tensor.shape[place]))  # noqa: PLW2901
            found[spec.name] = tensor[0] if row.is_single else tensor
        return found

    @property
    def _inputs(self) -> str:
        return ", ".join(
            f"{each.name!r} {each.dtype} [{', '.join(map(str, each.shape[1:]))}]" for each in self._spec.inputs
        )


def _tensor(value: Any, spec: TensorSpec) -> Tensor:
    """A tensor of the dtype of the input. Raises ObjectError for another value, or fractions where integers are expected."""
    dtype = DTYPES[spec.dtype]
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ObjectError(f"{spec.name!r} is not a tensor: {error}") from error
    if tensor.dtype != dtype:
        if tensor.is_floating_point() and not dtype.is_floating_point and tensor.numel():
            raise ObjectError(f"{spec.name!r} is {tensor.dtype}; expected {spec.dtype}")
        tensor = tensor.to(dtype)
    return tensor.cpu()


def _padded(rows: Sequence[_Row], inputs: Sequence[TensorSpec], pad: Mapping[str, float]) -> list[tuple[Tensor, ...]]:
    """The tensors of the rows, padded to equal lengths."""
    longest = {dim: max(row.lengths.get(dim, 0) for row in rows) for row in rows for dim in row.lengths}
    found = []
    for row in rows:
        tensors = []
        for spec, tensor in zip(inputs, row.tensors, strict=True):
            shape = [tensor.shape[0], *(longest[dim] if isinstance(dim, str) else dim or 0 for dim in spec.shape[1:])]
            if tuple(shape) != tuple(tensor.shape):
                wide = torch.full(shape, pad.get(spec.name, 0.0), dtype=tensor.dtype)
                wide[tuple(map(slice, tensor.shape))] = tensor
                tensor = wide  # noqa: PLW2901
            tensors.append(tensor)
        found.append(tuple(tensors))
    return found


def input_object(spec: BundleStageSpec, rows: Tensor) -> Any:
    """The object of one packed input row of a part of a bundle."""
    if not spec.is_first:
        return [rows, {}, {}, True]
    return {each.name: tensor[0] for each, tensor in zip(spec.inputs, spec.input_rows.unpack(rows), strict=True)}


def output_object(spec: BundleStageSpec, rows: Tensor) -> Any:
    """The object of one packed output row of a part of a bundle."""
    if not spec.is_last:
        return [rows, {}, {}, True]
    return {each.name: tensor[0] for each, tensor in zip(spec.outputs, spec.output_rows.unpack(rows), strict=True)}


def packed_output(spec: BundleStageSpec, found: Any) -> Tensor:
    """The packed output row of the object that a part of a bundle has returned. Raises ObjectError, BundleError, or LookupError."""
    if isinstance(found, InvalidInput):
        raise ObjectError(str(found))
    if not spec.is_last:
        rows: Tensor = found[0]
        return rows
    return spec.output_rows.pack([found[each.name][None] for each in spec.outputs])
