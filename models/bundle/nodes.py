"""The rows of a graph: nodes, their arguments, and how both are read from JSON without evaluating anything."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import torch

from multiworld_serving.models.bundle.operators import INTEGER_OPERATORS, find_operator
from multiworld_serving.models.errors import BundleError

BATCH = "batch"
"""Name of dimension 0 of every input and output."""
_MAX_DEPTH = 6
MAX_ITEMS = 4096
"""Longest list of arguments."""
_MAX_TEXT = 256
_MAX_INTEGER = (1 << 63) - 1
MAX_DIMS = 8
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,199}")
_KEY = re.compile(r"[ -~]{1,200}")
"""Key of a weight: any printable ASCII, as names of modules are."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
"""Element types by name."""
_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_LAYOUTS = {"strided": torch.strided}

Dim = int | str | None
"""A fixed length, the name of a variable dimension, or None: computed from variable dimensions."""
_NO_LENGTHS: Mapping[str, int] = MappingProxyType({})
NodeKind = Literal["input", "weight", "size", "call", "calls", "item", "integer"]


@dataclass(frozen=True, slots=True)
class Value:
    """An argument that refers to an earlier node."""

    name: str


class Device:
    """An argument that stands for the device on which the graph is built."""


@dataclass(frozen=True)
class Node:
    """One row of a graph.

    Attributes:
        dtype, shape: of the tensor; None for nodes that are not one tensor.
        target: the operator; of a weight its key in the weights file, of a size the variable dimension, of an item its index.
    """

    kind: NodeKind
    name: str
    target: str = ""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    shape: tuple[Dim, ...] | None = None

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the nodes that this one uses, each once."""
        return tuple(dict.fromkeys(_values((self.args, tuple(self.kwargs.values())))))

    @property
    def is_tensor(self) -> bool:
        return self.dtype is not None

    @property
    def has_rows(self) -> bool:
        """Whether it is a tensor with one row for each row of the batch, whose other dimensions are fixed or have a name."""
        return self.is_tensor and (self.shape or ())[:1] == (BATCH,) and None not in (self.shape or ())

    def row_bytes(self, lengths: Mapping[str, int] = _NO_LENGTHS) -> int:
        """Bytes of the tensor per row of the batch.

        Args:
            lengths: of the variable dimensions. Others, and computed ones, count as 1.
        """
        assert self.dtype is not None
        assert self.shape is not None
        known = {**lengths, BATCH: 1}
        return self.dtype.itemsize * math.prod(
            dim if isinstance(dim, int) else known.get(str(dim), 1) for dim in self.shape
        )


def row_of(node: Node) -> list[Any]:
    tensor: list[Any] = []
    if node.dtype is not None and node.shape is not None:
        tensor = [str(node.dtype).removeprefix("torch."), list(node.shape)]
    kwargs = {name: _encoded(value) for name, value in node.kwargs.items()}
    match node.kind:
        case "input":
            return ["input", node.name, *tensor]
        case "weight":
            return ["weight", node.name, *tensor, node.target]
        case "size":
            return ["size", node.name, node.target]
        case "item":
            return ["item", node.name, *tensor, node.args[0].name, int(node.target)]
        case "integer":
            return ["integer", node.name, node.target, _encoded(node.args)]
        case _:
            return [node.kind, node.name, *tensor, node.target, _encoded(node.args), kwargs]


def _encoded(argument: Any) -> Any:  # noqa: PLR0911 - one for each kind
    match argument:
        case Value():
            return {"value": argument.name}
        case Device():
            return {"device": None}
        case None | bool() | int() | str():
            return argument
        case float():
            return {"float": repr(argument)}
        case torch.dtype():
            return {"dtype": str(argument).removeprefix("torch.")}
        case torch.memory_format():
            return {"memory_format": str(argument).removeprefix("torch.")}
        case torch.layout():
            return {"layout": str(argument).removeprefix("torch.")}
        case tuple() | list():
            return [_encoded(item) for item in argument]
    raise BundleError(f"an argument of type {type(argument).__name__} cannot be written: {argument!r:.60}")


def node_from(row: Any) -> Node:  # noqa: PLR0911 - one for each kind
    match row:
        case ["input", str(name), dtype, shape]:
            return Node("input", _name(name), dtype=_dtype(dtype), shape=_shape(shape))
        case ["weight", str(name), dtype, shape, str(key)]:
            if not _KEY.fullmatch(key):
                raise BundleError(f"invalid graph: {key[:60]!r} is not the key of a weight")
            return Node("weight", _name(name), key, dtype=_dtype(dtype), shape=_shape(shape))
        case ["size", str(name), str(dimension)]:
            return Node("size", _name(name), _name(dimension))
        case ["call", str(name), dtype, shape, str(target), [*args], dict(kwargs)]:
            given, named = _call(target, args, kwargs)
            return Node("call", _name(name), target, given, named, _dtype(dtype), _shape(shape))
        case ["calls", str(name), str(target), [*args], dict(kwargs)]:
            return Node("calls", _name(name), target, *_call(target, args, kwargs))
        case ["item", str(name), dtype, shape, str(value), int(index)] if 0 <= index < MAX_ITEMS:
            picked = (Value(_name(value)),)
            return Node("item", _name(name), str(int(index)), picked, dtype=_dtype(dtype), shape=_shape(shape))
        case ["integer", str(name), str(target), [*args]] if target in INTEGER_OPERATORS:
            return Node("integer", _name(name), target, _decoded(args, 0))
    raise BundleError(f"invalid graph: row {str(row)[:80]!r} is not a known kind of node with its fields")


def _call(target: str, args: list[Any], kwargs: dict[Any, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    find_operator(target)
    if len(kwargs) > MAX_ITEMS:
        raise BundleError(f"invalid graph: {target} has {len(kwargs)} arguments")
    return _decoded(args, 0), {_name(name): _decoded(value, 0) for name, value in kwargs.items()}


def _name(text: Any) -> str:
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise BundleError(f"invalid graph: {str(text)[:60]!r} is not a name of letters, digits, '_' and '.'")
    return text


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise BundleError(
            f"invalid graph: {str(name)[:60]!r} is not an element type; expected one of {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def _shape(dims: Any) -> tuple[Dim, ...]:
    if not isinstance(dims, list) or len(dims) > MAX_DIMS:
        raise BundleError(f"invalid graph: {str(dims)[:60]!r} is not a shape of at most {MAX_DIMS} dimensions")
    for dim in dims:
        fixed = type(dim) is int and 0 <= dim < 1 << 40
        if not (fixed or dim is None or (isinstance(dim, str) and _NAME.fullmatch(dim))):
            raise BundleError(f"invalid graph: {str(dim)[:60]!r} is not a dimension")
    return tuple(dims)


def _decoded(argument: Any, depth: int) -> Any:  # noqa: PLR0911 - one for each kind
    if depth > _MAX_DEPTH:
        raise BundleError("invalid graph: arguments are nested too deep")
    match argument:
        case None | bool():
            return argument
        case int() if abs(argument) <= _MAX_INTEGER:
            return argument
        case str() if len(argument) <= _MAX_TEXT:
            return argument
        case list() if len(argument) <= MAX_ITEMS:
            return tuple(_decoded(item, depth + 1) for item in argument)
        case {"value": str(name), **others} if not others:
            return Value(_name(name))
        case {"float": str(text), **others} if not others and len(text) <= 40:
            try:
                return float(text)
            except ValueError as error:
                raise BundleError(f"invalid graph: {text!r} is not a number") from error
        case {"dtype": name, **others} if not others:
            return _dtype(name)
        case {"memory_format": str(name), **others} if not others and name in _MEMORY_FORMATS:
            return _MEMORY_FORMATS[name]
        case {"layout": str(name), **others} if not others and name in _LAYOUTS:
            return _LAYOUTS[name]
        case {"device": None, **others} if not others:
            return Device()
    raise BundleError(f"invalid graph: {str(argument)[:60]!r} is not an argument")


def _values(argument: Any) -> Iterator[str]:
    if isinstance(argument, Value):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _values(item)
