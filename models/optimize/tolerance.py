"""Allowed deviation of a stage's output from the reference, used by workers (choice of mode) and leaders (join self-test)."""

import torch
from torch import Tensor

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest `deviation` that a worker accepts for an execution mode, by precision. Measured for ResNet-18 to -152: 1e-6 in float32, 6e-3 in
bfloat16 and 1e-3 in float16."""

_LEAST_PROBABILITY = 1e-30


def deviation(output: Tensor, expected: Tensor, *, probabilities: bool = False) -> float:
    """Largest absolute difference of two tensors of the same shape, relative to the largest expected value.

    With `probabilities`, compares logarithms relative to their range, which is the relative difference of the logits. Softmax
    amplifies small differences of logits, so probabilities themselves would need a tolerance that accepts anything.

    Returns NaN if the output contains NaN: compare with `<=`, which is then false.
    """
    output, expected = output.to(torch.float32), expected.to(torch.float32)
    if not probabilities:
        return float((output - expected).abs().max()) / max(float(expected.abs().max()), _LEAST_PROBABILITY)
    if not bool(((output >= 0) & (output <= 1 + 1e-3)).all()):
        return float("nan")
    logits, expected_logits = (each.clamp_min(_LEAST_PROBABILITY).log() for each in (output, expected))
    spread = float(expected_logits.max() - expected_logits.min())
    return float((logits - expected_logits).abs().max()) / max(spread, 1.0)
