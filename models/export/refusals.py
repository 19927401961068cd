"""Why a module cannot be captured, in one line: the line of the user's code, and what to change."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils import _pytree

from multiworld_serving.models.bundle.nodes import BATCH
from multiworld_serving.models.bundle.operators import OPERATORS
from multiworld_serving.models.errors import ExportError

_OWN_FOLDER = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_VALUES = "choose between results with torch.where, and take sizes from shapes or constants"
_ROWS = "write x.shape[0] for the number of rows, not a constant or len(x), and no loop over rows"
_LENGTH = "take the length from the tensor's shape. Recurrent layers (GRU, LSTM, RNN) have a fixed length"
_ADVICE = {
    "generated guard": "the model is right for some lengths only, for example multiples of 4, or a layer has a stride; make it right for "
    "all lengths with functional.interpolate(…, size=other.shape[-2:]), or take [batch, frames, stride] and reshape it",
    "must always be equal": "name dimensions of equal length together: --dynamic INPUT:DIM,INPUT:DIM=LEAST..MOST",
    "__obj_flatten__": "it has quantized layers; export the model before its quantization",
    "CUDA": "create tensors on the device of the inputs, with device=x.device",
    "NVIDIA": "create tensors on the device of the inputs, with device=x.device",
}
"""What to change, by a part of torch's explanation."""
_BRANCHES = {
    "cond": "compute both results and choose with torch.where",
    "flex_attention": "use functional.scaled_dot_product_attention with attn_mask",
}
"""What to write instead of operators that take functions."""
IN_PYTHON = "or write it as a stage in Python (docs/models.md)"
_OUTSIDE = "compute this part in a stage in Python before or after the bundle (docs/models.md), or in the client"
_ALTERNATIVES = {
    "aten._pack_padded_sequence.default": "give the padded sequence to the recurrent layer, and mask its output",
    "complex": "it computes with complex numbers: use their real and imaginary parts",
    "random": "random numbers cannot be exported: use the model without them, or take them as an input",
    "buffer": "it changes a buffer: state between calls cannot be exported",
    "input": "it changes an input in place: compute a new tensor, such as x = x + 1 instead of x += 1",
}
"""What to do instead of an operator."""


@contextmanager
def recording_fixed_lengths() -> Iterator[tuple[list[str], dict[str, str]]]:
    """The lines of the model, such as " (File …)", at which torch.export finds out that a variable length is fixed.

    The dict has the lines at which it relies on an equation that it cannot prove for all lengths, a "generated guard", by the right side
    of the equation. Its error does not name the lines. It calls these functions of torch for each.
    """
    lines: list[str] = []
    equations: dict[str, str] = {}
    replace, log = ShapeEnv._set_replacement, ShapeEnv._log_guard

    def record(self: ShapeEnv, symbol: Any, value: Any, *rest: Any) -> None:
        if value.is_number:
            lines.append(_line_in(traceback.extract_stack()[:-1]))
        replace(self, symbol, value, *rest)

    def record_equation(self: ShapeEnv, prefix: str, guard: Any, forcing_spec: bool) -> None:
        if getattr(guard, "rel_op", "") == "==":
            equations.setdefault(str(guard.rhs), _line_in(traceback.extract_stack()[:-1]))
        log(self, prefix, guard, forcing_spec)

    ShapeEnv._set_replacement = record  # type: ignore[assignment, method-assign]
    ShapeEnv._log_guard = record_equation  # type: ignore[assignment, method-assign]
    try:
        yield lines, equations
    finally:
        ShapeEnv._set_replacement, ShapeEnv._log_guard = replace, log  # type: ignore[method-assign]


def why(error: Exception, fixed: tuple[Sequence[str], Mapping[str, str]]) -> str:
    """What torch.export refuses, with the line of the model.

    Args:
        fixed: see `recording_fixed_lengths`.
    """
    text, where = str(error), line_of(error)
    if "data-dependent" in text or "but got FakeTensor" in text:
        return (
            f"the model cannot be exported: a branch, a loop or a size depends on values{where}; {_VALUES}; {IN_PYTHON}"
        )
    lines, equations = fixed
    if guard := re.search(r"generated guard .* == (\w+)", text):
        where = where or equations.get(guard[1], "")
    else:
        where = where or next(filter(None, reversed(lines)), "")
    if found := re.search(r"You marked (\S+) as .* a constant \((\d+)\)", text):
        advice = _ROWS if found[1] == BATCH else _LENGTH
        return f"the model cannot be exported: the dimension {found[1]!r} is always {found[2]}{where}; {advice}"
    if f"Constraints violated ({BATCH})" in text:
        return f"torch cannot prove that the model is right for every batch size{where}; {_ROWS}, and no split of dimension 0"
    explained = [line.strip() for line in text.splitlines() if line.strip()]
    explanation = f"{type(error).__name__}: {' '.join(explained[:2])[:400]}"
    return f"the model cannot be exported: {explanation}{where}{advice_for(text)}; {IN_PYTHON}"


def advice_for(text: str) -> str:
    """What to change, by torch's explanation: "; …" or nothing."""
    return "".join(f"; {hint}" for hint in {_ADVICE[sign]: None for sign in _ADVICE if sign in text})


def line_of(error: BaseException) -> str:
    """The line of the user's code that raised, such as " (File …)". Empty if there is none."""
    return _line_in(traceback.extract_tb(error.__traceback__))


def _line_in(frames: Sequence[traceback.FrameSummary]) -> str:
    for frame in reversed(frames):
        if frame.filename.startswith(_OWN_FOLDER):
            break
        if _is_of_user(frame.filename):
            return f' (File "{frame.filename}", line {frame.lineno}, in {frame.name} {(frame.line or "")[:160]})'
    return ""


def function_argument(node: fx.Node) -> str:
    """Why a function that the model passes to an operator cannot be exported."""
    user = next(iter(node.users), node)
    name = str(user.target)
    return f"the model passes functions to {name}{_where(user)}; {_BRANCHES.get(name, 'write it without functions')}"


def no_batch(name: str, shape: Sequence[Any], node: fx.Node) -> str:
    """Why an output of this shape cannot be exported."""
    advice = "return one value or row for each row of the inputs, such as x.mean(dim=1) for x.mean(), or leave this output out"
    if BATCH in shape:
        advice = f"return it with the batch first: .movedim({shape.index(BATCH)}, 0)"
    dims = ", ".join("?" if dim is None else str(dim) for dim in shape)
    return f"dimension 0 of the output {name!r} [{dims}] is not the batch{_where(node)}; {advice}"


def not_tensors(output: object) -> str:
    """Why something that the model returns cannot be exported; empty if all of it can be."""
    plain = (Tensor, int, float, str, type(None))
    for value in _pytree.tree_leaves(output):
        name = type(value).__name__
        if not isinstance(value, plain):
            advice = "return tensors, or tuples and dicts of tensors"
            if "Cache" in name:
                advice = "set config.use_cache = False in the function that returns the model"
            return f"the model returns a {name}; {advice}"
    return ""


def refuse_computed_sizes(module: fx.GraphModule) -> None:
    """Raise ExportError if an operator that is neither torchvision's nor one with advice of its own computes a size from values."""
    node = next((each for each in module.graph.nodes if free_unbacked_symbols(each.meta.get("val"))), None)
    if node is not None and node.target is torch.ops.aten._local_scalar_dense.default:
        advice = f"compute with the tensor, without .item(), {IN_PYTHON}"
        raise ExportError(f"the model takes a number from a tensor{_where(node)}; {advice}")
    if node is not None and str(node.target).startswith("aten.") and str(node.target) not in _ALTERNATIVES:
        raise ExportError(
            f"the model computes a size from values with {node.target}{_where(node)}; keep all elements and mark some, for example with "
            f"torch.where or masked_fill, or take a fixed number with topk; {IN_PYTHON}"
        )


def not_allowed(nodes: Sequence[fx.Node]) -> str:
    """Names the operators that these nodes use, each once, and what to do instead."""
    names = {str(node.target): node for node in reversed(nodes)}
    found = "; ".join(f"{name}{_where(node)}" for name, node in reversed(names.items()))
    advice = dict.fromkeys(map(_alternative, names.values()))
    return f"the model uses operators that a bundle does not allow: {found}; {'; '.join(advice)}"


def _alternative(node: fx.Node) -> str:
    if node.target is torch.ops.aten.copy_.default:
        changed = node.args[0]
        return _ALTERNATIVES["input" if isinstance(changed, fx.Node) and changed.op == "placeholder" else "buffer"]
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return _ALTERNATIVES["random"]
    if str(node.target) in OPERATORS:
        return _ALTERNATIVES["complex"]
    return _ALTERNATIVES.get(str(node.target), _OUTSIDE)


def _where(node: fx.Node) -> str:
    """Where the model's code uses this operator, such as " (File …)": the last line of the trace outside torch."""
    trace = [line.strip() for line in (node.stack_trace or "").splitlines()]
    places = [index for index, line in enumerate(trace) if line.startswith("File ") and _is_of_user(line)]
    return f" ({' '.join(trace[places[-1] : places[-1] + 2])})" if places else ""


def _is_of_user(file: str) -> bool:
    is_standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    is_file = not file.startswith("<") and 'File "<' not in file
    return is_file and "/torch/" not in file and _OWN_FOLDER not in file and not is_standard
