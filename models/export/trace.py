"""Captures a module as a graph: torch.export, decomposed to functional operators, written as nodes."""

from __future__ import annotations

import inspect
import io
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim as ExportDim
from torch.utils import _pytree

from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.nodes import BATCH, Call, Calls, Dim, Input, Integer, Item, Node, Size, Weight
from multiworld_serving.models.bundle.operators import INTEGER_OPERATORS, OPERATORS
from multiworld_serving.models.errors import BundleError, ExportError
from multiworld_serving.models.export import refusals
from multiworld_serving.models.export.decompositions import decompositions


@dataclass(frozen=True)
class Dynamic:
    """A variable dimension besides the batch, with its least and largest length.

    Attributes:
        places: (input, dimension); several have the same length.
    """

    places: tuple[tuple[str, int], ...]
    least: int
    most: int

    @property
    def name(self) -> str:
        """Such as "ids_1"."""
        return "{}_{}".format(*self.places[0]).replace(".", "_")


def capture(
    module: nn.Module,
    example: Sequence[Tensor],
    names: Sequence[str],
    *,
    max_batch_size: int,
    dynamic: Sequence[Dynamic] = (),
    outputs: Sequence[str] = (),
) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of a module in eval mode, and its weights.

    Args:
        example: one tensor for each positional argument, with at least 2 rows: torch.export fixes dimensions of length 1.
        names: names for the inputs, in the same order.
        dynamic: further variable dimensions.
        outputs: names of the outputs, for errors.
    Returns:
        The graph, and its weights by key. Weights that share memory in the module (tied weights) have one key.
    Raises:
        ExportError: torch.export cannot capture the module, or it uses operators that bundles do not allow.
    """
    batch = ExportDim(BATCH, min=1, max=max_batch_size)
    further = {each: ExportDim(each.name, min=each.least, max=each.most) for each in dynamic}
    lengths = {place: dim for each, dim in further.items() for place in each.places}
    if unknown := [place for place in lengths if place[0] not in names]:
        raise ExportError(f"--dynamic: the model has no input {unknown[0][0]!r}; expected one of {', '.join(names)}")
    shapes: tuple[Any, ...] = tuple(
        {0: batch} | {dim: each for (owner, dim), each in lengths.items() if owner == name} for name in names
    )
    with warnings.catch_warnings(), torch.no_grad(), _without_logs(), refusals.recording_fixed_lengths() as fixed:
        warnings.simplefilter("ignore")
        try:
            exported = torch.export.export(
                module.eval(), tuple(example), dynamic_shapes=_shapes_of(module, shapes), strict=False
            )
            whole = exported.run_decompositions(dict(decompositions())).module()
        except Exception as error:  # torch.export raises whatever the model's code raises
            raise ExportError(refusals.why(error, fixed)) from error
    assert isinstance(whole, fx.GraphModule)
    _remove_checks(whole)
    refusals.refuse_computed_sizes(whole)
    graph, weights = _Writer(whole, names, shapes).write()
    made = {node.name: node for node in whole.graph.nodes}
    for name, value in zip(outputs, graph.outputs, strict=False):
        if graph.tensor(value).shape[:1] != (BATCH,):
            raise ExportError(
                refusals.no_batch(name, graph.tensor(value).shape, made.get(value, whole.graph.output_node()))
            )
    return graph, weights


def _shapes_of(module: nn.Module, shapes: tuple[Any, ...]) -> Any:
    """The shapes in the form of the arguments of `forward`: those of `*args` are one item."""
    kinds = {each.kind for each in inspect.signature(module.forward).parameters.values()}
    return (shapes,) if kinds == {inspect.Parameter.VAR_POSITIONAL} else shapes


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Let transformers compute padded positions, which torch's fast path for inference sets to 0. A captured graph has no fast path."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _without_logs() -> Iterator[None]:
    """Suppress what torch logs and prints about a model that it cannot capture: the exception says it too."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _remove_checks(module: fx.GraphModule) -> None:
    """Remove the checks of the arguments, which the service does itself."""
    for node in reversed(list(module.graph.nodes)):
        check = node.op == "call_module" or (node.op == "call_function" and "_assert" in str(node.target))
        if check and not node.users:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


class _Writer:
    """Writes an fx graph as nodes."""

    def __init__(self, module: fx.GraphModule, names: Sequence[str], shapes: Sequence[Mapping[int, Any]]) -> None:
        self._module = module
        self._names = names
        self._shapes = shapes
        self._symbols: dict[Any, str] = {}
        """Name of the variable dimension, by the symbol of torch.export."""
        self._nodes: list[Node] = []
        self._weights: dict[str, Tensor] = {}
        self._keys: dict[tuple[Any, ...], str] = {}
        """Keys of the weights, by memory, dtype, shape and strides."""
        self._refused: list[fx.Node] = []
        """Operators that bundles do not allow."""

    def write(self) -> tuple[Graph, dict[str, Tensor]]:
        inputs = [node for node in self._module.graph.nodes if node.op == "placeholder"]
        for node, shape in zip(inputs, self._shapes, strict=True):
            for dim, dynamic in shape.items():
                length = node.meta["val"].shape[dim]
                if isinstance(length, int):
                    raise ExportError(
                        f"dimension {dim} of input {self._names[inputs.index(node)]!r} is always {length} in this model; "
                        "give an example of another length, or do not make it variable"
                    )
                self._symbols[length.node.expr] = dynamic.__name__
        self._renamed = {node.name: name for node, name in zip(inputs, self._names, strict=True)}
        taken = {node.name for node in self._module.graph.nodes} - self._renamed.keys()
        if clash := taken.intersection(self._names):
            raise ExportError(f"the model has a value named {sorted(clash)[0]!r}; choose another name for this input")
        outputs: tuple[str, ...] = ()
        for node in self._module.graph.nodes:
            match node.op:
                case "placeholder":
                    self._nodes.append(Input(self._renamed[node.name], *self._tensor(node.meta["val"])))
                case "get_attr":
                    self._weight(node)
                case "call_function":
                    self._call(node)
                case "output":
                    outputs = tuple(
                        self._argument(value)["value"]
                        for value in _pytree.tree_leaves(node.args[0])
                        if isinstance(value, fx.Node)
                    )
                case other:
                    raise ExportError(f"the model cannot be exported: it contains a {other} ({node.target})")
        if self._refused:
            raise ExportError(refusals.not_allowed(self._refused))
        try:
            return Graph(tuple(self._nodes), outputs), self._weights
        except BundleError as error:
            raise ExportError(f"the model cannot be exported: {error}") from error

    def _tensor(self, value: Tensor) -> tuple[str, tuple[Dim, ...]]:
        return _name_of(value.dtype), tuple(map(self._dim, value.shape))

    def _dim(self, length: Any) -> Dim:
        if isinstance(length, int):
            return length
        return self._symbols.get(length.node.expr)

    def _weight(self, node: fx.Node) -> None:
        tensor: Any = self._module
        for part in str(node.target).split("."):
            tensor = getattr(tensor, part)
        if not isinstance(tensor, Tensor):
            raise ExportError(refusals.function_argument(node))
        tensor = tensor.detach()
        memory = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        key = self._keys.setdefault(memory if tensor.numel() else (node.target,), str(node.target))
        self._weights[key] = tensor
        self._nodes.append(Weight(node.name, *self._tensor(tensor), key))

    def _call(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.is_complex():
            self._refused.append(node)
            return
        args = self._argument(node.args)
        kwargs = {name: self._argument(each) for name, each in node.kwargs.items()}
        target = node.target
        if target is operator.getitem and isinstance(value, Tensor):
            self._nodes.append(Item(node.name, *self._tensor(value), args[0]["value"], args[1]))
        elif not isinstance(value, Tensor | tuple | list):  # a size
            self._integer(node, args)
        elif not isinstance(target, torch._ops.OpOverload) or str(target) not in OPERATORS:
            self._refused.append(node)
        elif isinstance(value, Tensor):
            self._nodes.append(Call(node.name, *self._tensor(value), str(target), args, kwargs))
        else:
            self._nodes.append(Calls(node.name, str(target), args, kwargs))

    def _integer(self, node: fx.Node, args: list[Any]) -> None:
        value = node.meta.get("val")
        symbol = getattr(getattr(value, "node", None), "expr", None)
        target: Any = node.target
        if symbol in self._symbols:
            self._nodes.append(Size(node.name, self._symbols[symbol]))
        elif str(target) == "aten.sym_size.int":
            self._nodes.append(Integer(node.name, "length", args))
        elif getattr(target, "__name__", "") in INTEGER_OPERATORS:
            self._nodes.append(Integer(node.name, target.__name__, args))
        else:
            self._refused.append(node)

    def _argument(self, argument: Any) -> Any:
        """How the graph writes an argument: the inverse of `literal`."""
        match argument:
            case None | bool() | int() | str():
                return argument
            case fx.Node():
                return {"value": self._renamed.get(argument.name, argument.name)}
            case torch.device():
                return {"device": None}
            case float():
                return {"float": repr(argument)}
            case torch.dtype() | torch.memory_format() | torch.layout():
                return {type(argument).__name__: _name_of(argument)}
            case tuple() | list():
                return list(map(self._argument, argument))
        raise ExportError(f"the model cannot be exported: it has an argument of type {type(argument).__name__}")


def _name_of(value: torch.dtype | torch.memory_format | torch.layout) -> str:
    return str(value).removeprefix("torch.")
