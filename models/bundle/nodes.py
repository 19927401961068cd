"""The rows of a graph: nodes and their arguments. msgspec reads and checks their form; nothing is evaluated.

Arguments stay as JSON has them until a graph is built: see `literal`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta, Struct

from multiworld_serving.models.bundle.operators import INTEGER_OPERATORS
from multiworld_serving.models.errors import BundleError

BATCH = "batch"
"""Name of dimension 0 of every input and output."""
MAX_DIMS = 8
MAX_ITEMS = 4096
"""Longest list of arguments."""
_MAX_DEPTH = 6
_MAX_ERROR_CHARACTERS = 300

_DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPES}
"""Element types by name."""
_LITERALS: dict[str, Mapping[str, Any]] = {
    "dtype": DTYPES,
    "memory_format": {
        "contiguous_format": torch.contiguous_format,
        "preserve_format": torch.preserve_format,
        "channels_last": torch.channels_last,
        "channels_last_3d": torch.channels_last_3d,
    },
    "layout": {"strided": torch.strided},
}
"""Values that JSON cannot express, by kind and name."""

Name = Annotated[str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_.]{0,199}\Z")]
Dtype = Annotated[str, Meta(pattern=rf"\A({'|'.join(_DTYPES)})\Z")]
"""A key of DTYPES."""
Dim = Annotated[int, Meta(ge=0, lt=1 << 40)] | Name | None
"""A fixed length, the name of a variable dimension, or None: computed from variable dimensions."""
Shape = Annotated[tuple[Dim, ...], Meta(max_length=MAX_DIMS)]
_Key = Annotated[str, Meta(pattern=r"\A[ -~]{1,200}\Z")]
"""Key of a weight: any printable ASCII, as names of modules are."""
_NO_LENGTHS: Mapping[str, int] = MappingProxyType({})


class Node(Struct, frozen=True, dict=True, array_like=True, forbid_unknown_fields=True):
    """One row of a graph."""

    name: Name

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the nodes that this one uses, each once."""
        match self:
            case Call(args=args, kwargs=kwargs) | Calls(args=args, kwargs=kwargs):
                return tuple(dict.fromkeys(names_in([*args, *kwargs.values()])))
            case Integer(args=args):
                return tuple(dict.fromkeys(names_in(args)))
            case Item(value=value):
                return (value,)
        return ()


class TensorNode(Node, frozen=True):
    """A node that is one tensor."""

    dtype: Dtype
    shape: Shape

    @property
    def has_rows(self) -> bool:
        """Whether it has one row for each row of the batch, and its other dimensions are fixed or have a name."""
        return self.shape[:1] == (BATCH,) and None not in self.shape

    def row_bytes(self, lengths: Mapping[str, int] = _NO_LENGTHS) -> int:
        """Bytes of the tensor per row of the batch.

        Args:
            lengths: of the variable dimensions. Others, and computed ones, count as 1.
        """
        known = {**lengths, BATCH: 1}
        return DTYPES[self.dtype].itemsize * math.prod(
            dim if isinstance(dim, int) else known.get(str(dim), 1) for dim in self.shape
        )

    def empty(self, lengths: Mapping[str, int] = _NO_LENGTHS) -> torch.Tensor:
        """A tensor without data. Raises BundleError if a dimension has no length."""
        try:
            dims: list[int] = [dim if isinstance(dim, int) else lengths[str(dim)] for dim in self.shape]
        except KeyError as error:
            raise BundleError(f"invalid graph: {self.name!r} has the unknown dimension {error}") from error
        return torch.empty(dims, dtype=DTYPES[self.dtype], device="meta")


class Input(TensorNode, frozen=True, tag="input"):
    """A tensor that the caller passes."""


class Weight(TensorNode, frozen=True, tag="weight"):
    """A tensor of the weights file."""

    key: _Key

    def check(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """The tensor with this key. Raises BundleError if there is none, or if it has another dtype or shape."""
        if tensor is None:
            raise BundleError(f"the weights lack {self.key!r}")
        if tensor.dtype != DTYPES[self.dtype] or tuple(tensor.shape) != self.shape:
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise BundleError(f"the weight {self.key!r} is {found}; the graph expects {self.dtype} {self.shape}")
        return tensor


class Size(Node, frozen=True, tag="size"):
    """The length of a variable dimension."""

    dimension: Name


class Integer(Node, frozen=True, tag="integer"):
    """Arithmetic on sizes. `target` is one of INTEGER_OPERATORS."""

    target: Annotated[str, Meta(pattern=rf"\A({'|'.join(INTEGER_OPERATORS)})\Z")]
    args: list[Any]


class Call(TensorNode, frozen=True, tag="call"):
    """An operator that returns a tensor."""

    target: str
    args: list[Any]
    kwargs: dict[str, Any]


class Calls(Node, frozen=True, tag="calls"):
    """An operator that returns several tensors; an `Item` picks one."""

    target: str
    args: list[Any]
    kwargs: dict[str, Any]


class Item(TensorNode, frozen=True, tag="item"):
    """One of several tensors."""

    value: Name
    index: Annotated[int, Meta(ge=0, lt=MAX_ITEMS)]


def names_in(argument: Any, depth: int = 0) -> Iterator[str]:
    """Names of the nodes in an argument, or in a list of arguments, in order."""
    match argument:
        case list() if depth > _MAX_DEPTH or len(argument) > MAX_ITEMS:
            raise BundleError(
                f"invalid graph: lists of arguments have more than {MAX_ITEMS} items or are nested too deep"
            )
        case list():
            for item in argument:
                yield from names_in(item, depth + 1)
        case {"value": str(name)}:
            yield name


def literal(argument: Any, values: Mapping[str, Any], device: torch.device) -> Any:
    """What an argument stands for.

    Args:
        values: of the earlier nodes, by name.
        device: of the graph.
    Raises:
        BundleError: it is not an argument.
    """
    match argument:
        case None | bool() | int() | str():
            return argument
        case list():
            return tuple(literal(item, values, device) for item in argument)
        case dict() if len(argument) == 1:
            ((kind, name),) = argument.items()
            known: dict[str, Mapping[Any, Any]] = {**_LITERALS, "value": values, "device": {None: device}}
            try:
                return float(name) if kind == "float" and isinstance(name, str) else known[kind][name]
            except (KeyError, TypeError, ValueError):
                pass
    raise BundleError(f"invalid graph: {str(argument)[:60]!r} is not an argument")


@contextmanager
def bundle_errors(what: str) -> Iterator[None]:
    """Raise BundleError of one line for what msgspec refuses."""
    try:
        yield
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BundleError(f"{what}: {' '.join(str(error).split())[:_MAX_ERROR_CHARACTERS]}") from error
