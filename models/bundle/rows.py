"""How the tensors of a request, of a boundary between stages, or of an answer travel: as one tensor with a row for each row of the batch.

A single tensor of fixed dimensions travels as it is, if messages can have its shape and element type. Everything else is packed into
uint8 [rows, bytes]. A packed row begins with the length of every variable or computed dimension (int64, in the order of the tensors),
followed by the bytes of each tensor's row. So schedulers, edges and frontends move rows without knowing what they contain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.models.bundle.nodes import BATCH, DTYPES
from multiworld_serving.models.errors import BundleError

MAX_ROW_BYTES = 1 << 30
MAX_COMPUTED_BYTES = 64 << 20
"""Longest row with dimensions that are computed. Only outputs of the model have them."""
_PLAIN_DIMS = range(2, 5)
_PLAIN_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8")
"""Dimensions, with the batch, and element types of messages of the service."""
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class RowFormat:
    """The tensors of a row.

    Attributes:
        tensors: with shapes (BATCH, …).
        dimensions: (least, most) length of each variable dimension.
    Raises:
        BundleError: a dimension or the size of a row is invalid.
    """

    tensors: tuple[TensorSpec, ...]
    dimensions: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tensor in self.tensors:
            dims = tensor.shape
            known = all(dim is None or isinstance(dim, int) or dim in self.dimensions for dim in dims[1:])
            if dims[:1] != (BATCH,) or not known:
                raise BundleError(f"rows of {tensor.name!r:.60} cannot have the shape {list(dims)!s:.100}")
        if not self.tensors or self._bytes(self._largest) > MAX_ROW_BYTES:
            raise BundleError(f"a row has no tensor, or more than {MAX_ROW_BYTES >> 20} MiB")

    @cached_property
    def is_plain(self) -> bool:
        """Whether rows are those of the only tensor."""
        tensor = self.tensors[0]
        can_be_sent = len(tensor.shape) in _PLAIN_DIMS and tensor.dtype in _PLAIN_DTYPES
        return len(self.tensors) == 1 and not self._variable and can_be_sent

    @property
    def varies(self) -> bool:
        """Whether rows have different lengths."""
        return bool(self._variable)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return DTYPES[self.tensors[0].dtype] if self.is_plain else torch.uint8

    @cached_property
    def row_shape(self) -> tuple[int, ...] | None:
        """Shape of one row; None if it depends on variable dimensions."""
        if self.is_plain:
            return self._shapes(())[0]
        return None if self._variable else (self._bytes(()),)

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """Shape of one row; if it varies, the number of bytes of the longest row."""
        return self.row_shape or (self.max_row_bytes,)

    def accepts(self, row_shape: tuple[int, ...]) -> bool:
        """Whether rows may have this shape. If it varies, the rows of a batch have equal lengths, which other batches may not have."""
        if self.varies:
            return len(row_shape) == 1 and 0 < row_shape[0] <= self.max_row_bytes
        return row_shape == self.dims

    @cached_property
    def max_row_bytes(self) -> int:
        """Bytes of the longest row. With a computed dimension it is `MAX_COMPUTED_BYTES`, which `check_graph` ensures."""
        return MAX_COMPUTED_BYTES if None in self._variable else self._bytes(self._largest)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """The rows of these tensors, which have one row for each row of the batch.

        Raises:
            BundleError: the tensors are not those of the format.
        """
        lengths = self.check(tensors)
        if self.is_plain:
            return tensors[0]
        count = len(tensors[0])
        head = torch.tensor(lengths, dtype=torch.int64, device=tensors[0].device).expand(count, -1)
        parts = (each.reshape(count, math.prod(each.shape[1:])) for each in (head, *tensors))
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)

    def unpack(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `pack`. May share memory with `rows`.

        Raises:
            BundleError: the rows are not of this format, or differ in the lengths of their dimensions.
        """
        if self.is_plain:
            self.check((rows,))
            return (rows,)
        if rows.dtype != torch.uint8 or rows.dim() != 2:
            raise BundleError(f"packed rows are {rows.dtype} {list(rows.shape)}; expected uint8 [rows, bytes]")
        lengths = self.lengths(rows)
        if rows.shape[1] != self._bytes(lengths):
            raise BundleError(f"packed rows have {rows.shape[1]} bytes; expected {self._bytes(lengths)}")
        _, *parts = rows.split_with_sizes(self._sizes(lengths), dim=1)
        # Each part is copied, because the bytes of a tensor must begin at a multiple of the size of its elements.
        copies = (part.clone(memory_format=torch.contiguous_format).flatten() for part in parts)
        return tuple(
            copy.view(DTYPES[tensor.dtype]).view(len(rows), *shape)
            for tensor, copy, shape in zip(self.tensors, copies, self._shapes(lengths), strict=True)
        )

    def lengths(self, rows: Tensor) -> tuple[int, ...]:
        """Lengths of the dimensions that are not fixed, in the order of the tensors.

        Raises:
            BundleError: the rows have different lengths, or lengths out of range.
        """
        count = len(self._variable)
        if not count:
            return ()
        size = count * _LENGTH_BYTES
        if rows.dim() != 2 or not len(rows) or rows.shape[1] < size or rows.dtype != torch.uint8:
            raise BundleError(f"packed rows have {list(rows.shape)} bytes; expected at least {size} in each row")
        heads = (
            rows[:, :size].cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.int64).view(-1, count)
        )
        if not bool((heads == heads[0]).all()):
            raise BundleError("the rows of a batch have different lengths; expected equal ones")
        found = tuple(heads[0].tolist())
        self._lengths_to_check(found)
        return found

    def key(self, rows: Tensor) -> str:
        """Text that is equal for rows that can be in one batch. Empty if all can. Raises BundleError as `lengths`."""
        return "x".join(map(str, self.lengths(rows)))

    @cached_property
    def _variable(self) -> tuple[str | None, ...]:
        """Names of the dimensions that are not fixed, in the order of the tensors."""
        return tuple(dim for tensor in self.tensors for dim in tensor.shape[1:] if not isinstance(dim, int))

    @property
    def _largest(self) -> tuple[int, ...]:
        """The largest lengths; 1 for computed dimensions."""
        return tuple(1 if dim is None else self.dimensions[dim][1] for dim in self._variable)

    def _lengths_to_check(self, lengths: Sequence[int]) -> None:
        known: dict[str, int] = {}
        for dim, length in zip(self._variable, lengths, strict=True):
            least, most = (0, MAX_ROW_BYTES) if dim is None else self.dimensions[dim]
            if not least <= length <= most or (dim is not None and known.setdefault(dim, length) != length):
                name = "a computed dimension" if dim is None else f"the dimension {dim!r}"
                raise BundleError(f"{name} has the length {length}; expected {least} to {most}, and one length per row")

    def check(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The lengths of the dimensions that are not fixed. Raises BundleError for tensors that are not of the format."""
        if len(tensors) != len(self.tensors):
            raise BundleError(f"{len(tensors)} tensors; expected {len(self.tensors)}")
        lengths: list[int] = []
        for tensor, spec in zip(tensors, self.tensors, strict=True):
            dims = (len(tensors[0]), *spec.shape[1:])
            pairs = list(zip(dims, tensor.shape, strict=False))
            fits = tensor.dtype == DTYPES[spec.dtype] and tensor.dim() == len(dims)
            if not fits or any(isinstance(dim, int) and dim != length for dim, length in pairs):
                found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                raise BundleError(f"{spec.name!r:.60} is {found}; expected {spec.dtype} {list(spec.shape)}")
            lengths += [length for dim, length in pairs if not isinstance(dim, int)]
        self._lengths_to_check(lengths)
        return tuple(lengths)

    def _shapes(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes of one row of each tensor."""
        left = iter(lengths)
        return [
            tuple(dim if isinstance(dim, int) else next(left) for dim in tensor.shape[1:]) for tensor in self.tensors
        ]

    def _sizes(self, lengths: Sequence[int]) -> list[int]:
        """Bytes of the lengths, and of each tensor, in a row."""
        shapes = zip(self.tensors, self._shapes(lengths), strict=True)
        return [
            len(lengths) * _LENGTH_BYTES,
            *(DTYPES[tensor.dtype].itemsize * math.prod(shape) for tensor, shape in shapes),
        ]

    def _bytes(self, lengths: Sequence[int]) -> int:
        """Bytes of a row."""
        return sum(self._sizes(lengths))
