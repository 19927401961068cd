"""How far the output of an optimized stage is from that of the stage as written, and how far it may be."""

import math

import torch
from torch import Tensor

from multiworld_serving.models.bundle.stage import BundleStageSpec

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest `deviation` that a worker accepts for an execution mode, by precision. Measured for ResNet-18 to -152: 1e-6 in float32, 6e-3 in
bfloat16 and 1e-3 in float16."""
_LEAST_PROBABILITY = 1e-30


def deviation(
    output: Tensor, expected: Tensor, *, probabilities: bool = False, dtype: torch.dtype = torch.float32
) -> float:
    """Largest absolute difference of two tensors of the same shape, relative to the largest expected value.

    With `probabilities`, compares logarithms relative to their range, which is the relative difference of the logits. Softmax
    amplifies small differences of logits, so probabilities themselves would need a tolerance that accepts anything.

    Infinity and NaN count as equal where they are expected. Elsewhere, returns one of them: compare with `<=`, which is then false. The
    largest numbers of `dtype`, in which the output was computed, count as infinity: attention masks contain either.
    """
    output, expected = _with_infinity(output, dtype), _with_infinity(expected, dtype)
    if not probabilities:
        differences = torch.where((output == expected) | (output.isnan() & expected.isnan()), 0, output - expected)
        largest = float(expected.abs().nan_to_num(0, 0, 0).max())
        return float(differences.abs().max()) / max(largest, _LEAST_PROBABILITY)
    if not bool(((output >= 0) & (output <= 1 + 1e-3)).all()):
        return float("nan")
    logits, expected_logits = (each.clamp_min(_LEAST_PROBABILITY).log() for each in (output, expected))
    spread = float(expected_logits.max() - expected_logits.min())
    return float((logits - expected_logits).abs().max()) / max(spread, 1.0)


def _with_infinity(values: Tensor, dtype: torch.dtype) -> Tensor:
    """As float32, with infinity instead of numbers that `dtype` does not exceed."""
    values, largest = values.to(torch.float32), torch.finfo(dtype).max
    return values.masked_fill(values >= largest, math.inf).masked_fill(values <= -largest, -math.inf)


def deviation_of_rows(output: Tensor, expected: Tensor, spec: BundleStageSpec, precision: str) -> float:
    """The largest `deviation` of all output tensors of a stage, on the CPU. NaN if one is invalid, or of another shape or dtype.

    Integers must be equal in float32. In a lower precision, those such as the index of a maximum may differ.

    Raises:
        BundleError: the output is not of the format of the stage's rows.
    """
    if output.shape != expected.shape or output.dtype != expected.dtype:
        return math.nan
    found = [0.0]
    for one, other in zip(spec.output_rows.unpack(output), spec.output_rows.unpack(expected), strict=True):
        if one.shape != other.shape:
            return math.nan
        if other.is_floating_point():
            probabilities = spec.probabilities and precision != "float32"
            found.append(deviation(one, other, probabilities=probabilities, dtype=getattr(torch, precision)))
        elif precision == "float32" and not one.equal(other):
            return math.inf
    return next(filter(math.isnan, found), max(found))
