"""Why a module cannot be captured, in one line: the line of the user's code, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from multiworld_serving.models.errors import ExportError

_OWN_FOLDER = str(Path(__file__).parents[1])
_ADVICE = {
    "data-dependent": "replace branches on values by torch.where, and numbers from values by shapes",
    "specialized": "the model computes with a fixed number of rows or another length; take it from the tensor's shape. Recurrent layers "
    "(GRU, LSTM, RNN) have a fixed length",
    "generated guard": "the model is right for some lengths only, for example multiples of 4, or a layer has a stride; make it right for "
    "all lengths with functional.interpolate(…, size=other.shape[-2:]), or take [batch, frames, stride] and reshape it",
    "must always be equal": "name dimensions of equal length together: --dynamic INPUT:DIM,INPUT:DIM=LEAST..MOST",
}
"""What to change, by a part of torch.export's explanation."""

_OUTSIDE = (
    "compute this part outside of the model: before it in `decode` or after it in `encode` of a handler (serve --handler), or in the "
    "client"
)
_ALTERNATIVES = {
    "aten._pack_padded_sequence.default": "give the padded sequence to the recurrent layer, and mask its output",
    "random": "random numbers cannot be exported: use the model without them, or take them as an input",
    "buffer": "it changes a buffer: state between calls cannot be exported",
    "input": "it changes an input in place: compute a new tensor, such as x = x + 1 instead of x += 1",
}
"""What to do instead of an operator."""


def why(error: Exception) -> str:
    """The first lines of torch.export's explanation, with the line of the model."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    code = [
        line for line in lines if line.startswith(("File ", "at ", "(File ")) and "site-packages/torch/" not in line
    ]
    where = f" ({code[-1].strip('()')})" if code and code[-1] not in lines[:2] else ""
    advice = "".join(f"; {hint}" for sign, hint in _ADVICE.items() if sign in text)
    return f"the model cannot be exported: {type(error).__name__}: {' '.join(lines[:2])[:400]}{where}{advice}"


def refuse_computed_sizes(module: fx.GraphModule) -> None:
    """Raise ExportError if an operator that is neither torchvision's nor one with advice of its own computes a size from values."""
    node = next((each for each in module.graph.nodes if free_unbacked_symbols(each.meta.get("val"))), None)
    if node is not None and str(node.target).startswith("aten.") and str(node.target) not in _ALTERNATIVES:
        raise ExportError(
            f"the model computes a size from values with {node.target}{_where(node)}; keep all elements and mark some, for example with "
            "torch.where or masked_fill, or take a fixed number with topk"
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
    return _ALTERNATIVES.get(str(node.target), _OUTSIDE)


def _where(node: fx.Node) -> str:
    """Where the model's code uses this operator, such as " (File …)": the last line of the trace outside torch."""
    trace = [line.strip() for line in (node.stack_trace or "").splitlines()]
    places = [index for index, line in enumerate(trace) if line.startswith("File ") and _is_of_user(line)]
    return f" ({' '.join(trace[places[-1] : places[-1] + 2])})" if places else ""


def _is_of_user(line: str) -> bool:
    return "/torch/" not in line and _OWN_FOLDER not in line
