"""How far the output of an optimized stage is from that of the stage as written, and how far it may be."""

import math

import torch
from torch import Tensor

from multiworld_serving.models.bundle.stage import BundleStageSpec
from multiworld_serving.models.optimize.tuning import COMPUTE_DTYPES

TOLERANCE = {"float32": 1e-4, "tf32": 2e-3, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest `deviation` that a worker accepts for an execution mode, by precision. Measured for ResNet-18 to -152: 1e-6 in float32, 6e-3 in
bfloat16 and 1e-3 in float16. TF32, emulated on a processor for ResNet-50: 4e-4."""
_LEAST_PROBABILITY = 1e-30
_INFINITE = torch.finfo(torch.bfloat16).max
"""Expected values from here count as infinity. The largest number of float32 is a little larger."""


def deviation(
    output: Tensor, expected: Tensor, *, probabilities: bool = False, dtype: torch.dtype = torch.float32
) -> float:
    """Largest absolute difference of two tensors of the same shape, relative to the largest expected value.

    With `probabilities`, compares logarithms relative to their range, which is the relative difference of the logits. Softmax
    amplifies small differences of logits, so probabilities themselves would need a tolerance that accepts anything.

    Infinity and NaN count as equal where they are expected. Elsewhere, returns one of them: compare with `<=`, which is then false.
    Attention masks contain infinity or the lowest number of float32, which is the lowest one of `dtype` if the output was computed in it.
    """
    output, expected = output.to(torch.float32), expected.to(torch.float32)
    expected = torch.where(expected.abs() >= _INFINITE, expected.sign() * math.inf, expected)
    is_largest = output.abs() >= torch.finfo(dtype).max
    output = torch.where(expected.isinf() & is_largest & (output.sign() == expected.sign()), expected, output)
    if not probabilities:
        differences = torch.where((output == expected) | (output.isnan() & expected.isnan()), 0, output - expected)
        largest = float(expected.abs().nan_to_num(0, 0, 0).max())
        return float(differences.abs().max()) / max(largest, _LEAST_PROBABILITY)
    if not bool(((output >= 0) & (output <= 1 + 1e-3)).all()):
        return float("nan")
    logits, expected_logits = (each.clamp_min(_LEAST_PROBABILITY).log() for each in (output, expected))
    spread = float(expected_logits.max() - expected_logits.min())
    return float((logits - expected_logits).abs().max()) / max(spread, 1.0)


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
            found.append(deviation(one, other, probabilities=probabilities, dtype=COMPUTE_DTYPES[precision]))
        elif precision == "float32" and not one.equal(other):
            return math.inf
    return next(filter(math.isnan, found), max(found))
