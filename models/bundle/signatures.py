"""Operators whose kernels do not check all of their arguments: what a graph may pass to them.

torch's kernels on the CPU check most arguments themselves. Those of the operators here read beyond the end of a tensor, return memory that
was not written, or end the process. `check_call` refuses invalid calls when a graph is read. Shapes of tensors that the graph computes
are only known for the lengths that were checked, so `guarded` names those that `expect_shapes` compares again with each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from multiworld_serving.models.bundle.nodes import Call, Calls, Integer, Node, Shape, TensorNode, Weight, names_in
from multiworld_serving.models.bundle.operators import find_operator
from multiworld_serving.models.errors import BundleError

_BATCH_NORMS = ("aten._native_batch_norm_legit_no_training.default", "aten._native_batch_norm_legit.no_stats")
_GATES = {"aten.lstm.input": 4, "aten.gru.input": 3, "aten.rnn_tanh.input": 1, "aten.rnn_relu.input": 1}
_SAMPLERS = {"aten.grid_sampler_2d.default": 3, "aten.grid_sampler_3d.default": 2}
"""Number of interpolation modes; the kernels leave the output uninitialised for others."""
_PADDING_MODES = 3
_ATTENTION = "aten.scaled_dot_product_attention.default"
_ENUMERATIONS = ("dtype", "layout", "memory_format")
_WINDOWS = ("kernel_size", "stride", "dilation")
_DIVISIONS = ("aten.div.Tensor_mode", "aten.div.Scalar_mode")


def check_call(node: Call | Calls, nodes: Mapping[str, Node]) -> None:
    """Raise BundleError if an operator that does not check its arguments gets invalid ones.

    Args:
        nodes: the earlier nodes, by name.
    """
    if not _enumerations_are_valid(node) or not _windows_are_fixed(node, nodes) or not _is_valid(node, nodes):
        raise BundleError(f"invalid graph: the arguments of {node.name!r} are not those that {node.target} may have")


def guarded(node: Node, nodes: Mapping[str, Node]) -> list[TensorNode]:
    """The tensors whose shapes are compared before this node is computed, because its kernel relies on them. Mostly none."""
    if not isinstance(node, Call | Calls) or node.target not in (*_BATCH_NORMS, *_GATES, _ATTENTION):
        return []
    operands = [nodes[name] for name in dict.fromkeys(names_in([*node.args, *node.kwargs.values()]))]
    tensors = [each for each in operands if isinstance(each, TensorNode) and not isinstance(each, Weight)]
    if node.target == _ATTENTION and not _argument(node, "enable_gqa", False):
        return []
    if node.target in _BATCH_NORMS and all(_has_fixed_channels(each, nodes) for each in tensors):
        return []
    return tensors


def expect_shapes(shapes: Sequence[Shape], *tensors: Tensor) -> None:
    """Raise ValueError unless the tensors have these shapes. A name stands for one length in all of them, and None for any length."""
    lengths: dict[str, int] = {}
    for shape, tensor in zip(shapes, tensors, strict=True):
        dims = list(tensor.shape)
        if len(dims) != len(shape) or any(
            dim is not None and length != (dim if isinstance(dim, int) else lengths.setdefault(dim, length))
            for dim, length in zip(shape, dims, strict=False)
        ):
            raise ValueError(f"a tensor has the shape {dims}; the graph declares {list(shape)}")


fx.node.has_side_effect(expect_shapes)  # no pass removes it


def dividing(target: str, function: Callable[..., Any], integers: bool) -> Callable[..., Any]:
    """The operator, or for a division of integers a replacement: the quotient of the lowest integer and -1 ends the process."""
    if target not in _DIVISIONS or not integers:
        return function

    def divide(dividend: Tensor, divisor: Tensor | int, *, rounding_mode: str | None = None) -> Any:
        if isinstance(divisor, Tensor):
            is_negation = divisor == -1
            quotient = function(dividend, divisor.masked_fill(is_negation, 1), rounding_mode=rounding_mode)
            return torch.where(is_negation, -dividend, quotient)
        return -dividend if divisor == -1 else function(dividend, divisor, rounding_mode=rounding_mode)

    return divide


def _enumerations_are_valid(node: Call | Calls) -> bool:
    """Whether no number stands for an element type, layout or memory format: torch does not check whether it is one of them."""
    given = {name: _argument(node, name) for name in _ENUMERATIONS}
    return all(value is None or (isinstance(value, dict) and name in value) for name, value in given.items())


def _windows_are_fixed(node: Call | Calls, nodes: Mapping[str, Node]) -> bool:
    """Whether no window of a pooling or convolution is computed from sizes: kernels loop over windows of any size, also for years."""
    given = [_argument(node, name) for name in _WINDOWS]
    return not any(isinstance(nodes[each], Integer) for each in names_in(given))


def _is_valid(node: Call | Calls, nodes: Mapping[str, Node]) -> bool:
    target = node.target
    if target in _BATCH_NORMS:
        return _batch_norm_is_valid(node, nodes)
    if target in _GATES:
        return _recurrent_is_valid(node, nodes)
    if target in _SAMPLERS:
        limits = {"interpolation_mode": _SAMPLERS[target], "padding_mode": _PADDING_MODES}
        modes = [(_argument(node, name), limit) for name, limit in limits.items()]
        return all(type(mode) is int and 0 <= mode < limit for mode, limit in modes)
    if target == _ATTENTION:
        return _attention_is_valid(node, nodes)
    # In training mode, these operators overwrite the running statistics, which are weights.
    if target == "aten.instance_norm.default" and _argument(node, "use_input_stats") is not False:
        return [_argument(node, name) for name in ("running_mean", "running_var")] == [None, None]
    return target != "aten.batch_norm.default" or _argument(node, "training") is False


def _batch_norm_is_valid(node: Call | Calls, nodes: Mapping[str, Node]) -> bool:
    tensors = [nodes[name] for name in names_in(node.args)]
    if node.kwargs or not tensors or not isinstance(node.args[0], dict):
        return False
    input_, *weights = tensors
    channels = _shape(input_)[1:2]
    if node.target.endswith("no_stats") and _argument(node, "training") is not True:
        return False
    return len(channels) == 1 and all(isinstance(each, Weight) and each.shape == channels for each in weights)


def _recurrent_is_valid(node: Call | Calls, nodes: Mapping[str, Node]) -> bool:
    """See torch.nn.LSTM: for each layer and direction weights of the input and of the state and, if there are any, their biases."""
    if node.kwargs or len(node.args) != 9:
        return False
    input_, states, weights, has_biases, layers, dropout, train, bidirectional, batch_first = node.args
    flags_are_valid = all(isinstance(each, bool) for each in (has_biases, train, bidirectional, batch_first))
    if (
        not flags_are_valid
        or train
        or dropout != {"float": "0.0"}
        or not isinstance(layers, int)
        or not 1 <= layers <= 64
    ):
        return False
    lists_are_valid = isinstance(weights, list) and (isinstance(states, list) == (node.target == "aten.lstm.input"))
    if not lists_are_valid or not isinstance(input_, dict):
        return False
    found = [nodes[name] for name in names_in([input_, states, weights])]
    sequence, *rest = found
    number = 2 if isinstance(states, list) else 1
    hidden, params = rest[:number], rest[number:]
    shape, state = _shape(sequence), _shape(hidden[0]) if hidden else ()
    directions = 2 if bidirectional else 1
    if len(shape) != 3 or len(state) != 3 or len(hidden) != number or not isinstance(state[2], int):
        return False
    size, rows, features = state[2], _GATES[node.target] * state[2], shape[2]
    expected: list[tuple[Any, ...]] = []
    for layer in range(layers):
        width = features if layer == 0 else directions * size
        expected += directions * [(rows, width), (rows, size), *([(rows,), (rows,)] if has_biases else [])]
    are_weights = all(isinstance(each, Weight) for each in params) and [_shape(each) for each in params] == expected
    own = (layers * directions, shape[0] if batch_first else shape[1], size)
    return are_weights and None not in shape and all(_shape(each) == own for each in hidden)


def _attention_is_valid(node: Call | Calls, nodes: Mapping[str, Node]) -> bool:
    if _argument(node, "dropout_p", {"float": "0.0"}) not in ({"float": "0.0"}, 0):
        return False
    if not _argument(node, "enable_gqa", False):
        return True
    tensors = [_shape(nodes[name]) for name in names_in(node.args[:3])]  # the kernel divides by the number of key heads
    return len(tensors) == 3 and all(len(each) == 4 and isinstance(each[1], int) and each[1] > 0 for each in tensors)


def _has_fixed_channels(node: Node, nodes: Mapping[str, Node]) -> bool:
    """Whether it is a convolution, whose channels are those of its weight."""
    if not isinstance(node, Call) or not node.target.startswith(
        ("aten.conv1d.", "aten.conv2d.", "aten.conv3d.", "aten.convolution.")
    ):
        return False
    operands = [nodes[name] for name in names_in(node.args)]
    if len(operands) < 2 or not isinstance(operands[1], Weight):
        return False
    is_transposed = node.target == "aten.convolution.default" and _argument(node, "transposed") is not False
    return not is_transposed and operands[1].shape[:1] == node.shape[1:2]


def _shape(node: Node) -> Shape:
    return getattr(node, "shape", ())


def _argument(node: Call | Calls, name: str, default: Any = None) -> Any:
    """An argument by its name, wherever it is."""
    names = [each.name for each in find_operator(node.target)._schema.arguments]
    if name in names[: len(node.args)]:
        return node.args[names.index(name)]
    return node.kwargs.get(name, default)
