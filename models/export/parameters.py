"""Binds example inputs to the parameters of a module's `forward`, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from multiworld_serving.models.errors import ExportError


class _Bound(nn.Module):
    """Takes tensors by position, and calls a module with the arguments that contain them."""

    def __init__(self, module: nn.Module, by_position: Sequence[str], structure: _pytree.TreeSpec) -> None:
        super().__init__()
        self.module = module
        self._by_position = by_position
        self._structure = structure
        self.eval()

    def forward(self, *tensors: Tensor) -> Any:
        given = _pytree.tree_unflatten(tensors, self._structure)
        args = [given.pop(name) for name in self._by_position]
        return self.module(*args, **given)


def bind_inputs(module: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    """`bind` for inputs named PARAMETER, or PARAMETER.KEY for an entry of a dict.

    A single input may have any name if `forward` has one parameter.
    """
    given: dict[str, Any] = {}
    for name, tensor in inputs.items():
        parameter, _, key = name.partition(".")
        entries = given.setdefault(parameter, {}) if key else given
        if not isinstance(entries, dict) or (not key and parameter in given):
            raise ExportError(f"--input {name}: {parameter!r} is either one tensor or a dict of tensors, not both")
        entries[key or parameter] = tensor
    if len(_parameters(module)) == len(given) == 1 and given.keys() == inputs.keys():
        return module, dict(inputs)
    return bind(module, given)


def bind_example(module: nn.Module, example: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """`bind` for a tensor, a sequence by position, or a dict by parameter.

    A dict with other keys is the argument of a `forward` with one required parameter.
    """
    parameters = _parameters(module)
    if isinstance(example, Tensor):
        example = (example,)
    if isinstance(example, Sequence) and len(example) <= len(parameters):
        example = dict(zip(parameters, example, strict=False))
    if not isinstance(example, Mapping) or not example:
        count = f" of {len(example)}" if isinstance(example, Sequence | Mapping) else ""
        raise ExportError(
            f"the example is {type(example).__name__}{count}; expected a tensor, a tuple of tensors, or a dict by parameter. "
            f"forward takes {_described(parameters)}"
        )
    required = [name for name, each in parameters.items() if each.default is each.empty]
    if len(required) == 1 and not parameters.keys() & example.keys():
        example = {required[0]: dict(example)}
    return bind(module, example)


def bind(module: nn.Module, given: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    """A module that takes tensors by position, and these tensors by name. It is `module` if they are its first arguments.

    Args:
        given: tensors, or dicts and lists of tensors, by parameter of `forward`. Other parameters have their defaults.
    Raises:
        ExportError: `forward` does not take these arguments, or they contain something else than tensors.
    """
    parameters = _parameters(module)
    if unknown := [name for name in given if name not in parameters]:
        raise ExportError(f"forward has no parameter {unknown[0]!r:.60}; it takes {_described(parameters)}")
    given = {name: value for name, value in given.items() if value is not None or parameters[name].default is not None}
    by_position = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_ONLY and name in given]
    named = {name: value for name, value in given.items() if name not in by_position}
    try:
        found = inspect.signature(module.forward).bind(*(given[name] for name in by_position), **named).arguments
    except TypeError as error:
        raise ExportError(f"forward: {error}; it takes {_described(parameters)}") from error
    if found.keys() != given.keys():
        raise ExportError(f"forward takes {', '.join(found)} by position: give these, too")
    leaves, structure = _pytree.tree_flatten_with_path(dict(given))
    tensors: dict[str, Tensor] = {}
    for path, leaf in leaves:
        name = ".".join(str(getattr(part, "key", getattr(part, "idx", None))) for part in path)
        if not isinstance(leaf, Tensor):
            raise ExportError(f"the example of {name!r:.60} is {type(leaf).__name__}; expected a tensor")
        if not name.isascii() or not name.replace(".", "_").isidentifier():
            raise ExportError(f"the example has the key {name!r:.60}; expected keys of letters, digits and _")
        tensors[name] = leaf
    first = [name for name, each in parameters.items() if each.kind is not each.KEYWORD_ONLY][: len(tensors)]
    return (module if list(tensors) == first else _Bound(module, by_position, structure)), tensors


def _parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    """The parameters that have a name. Raises ExportError if there is none."""
    signature = inspect.signature(module.forward)
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    named = {name: each for name, each in signature.parameters.items() if each.kind not in variadic}
    if not named:
        raise ExportError(
            f"forward{signature} names no parameter; write a module whose forward names its inputs and calls this model"
        )
    return named


def _described(parameters: Mapping[str, inspect.Parameter]) -> str:
    return ", ".join(name if each.default is each.empty else f"{name} (optional)" for name, each in parameters.items())
