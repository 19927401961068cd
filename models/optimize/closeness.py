"""How far the output of a stage may be from the reference: stated once, for workers that choose and for leaders that check."""

import torch
from torch import Tensor

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest `deviation` that a worker accepts of what it chooses by itself, by precision. ResNets of 18 to 152 layers were seen to deviate by
1e-6 in float32, 6e-3 in bfloat16 and 1e-3 in float16."""

_LEAST_PROBABILITY = 1e-30


def deviation(output: Tensor, expected: Tensor, *, probabilities: bool = False) -> float:
    """Largest difference of two float32 tensors of one shape, as a share of the largest value that was expected.

    With `probabilities` it is the logarithms that are compared, as a share of how far apart they lie: that is how much
    the logits differ. A softmax blows up small differences of logits, so that probabilities themselves would need a
    tolerance that lets anything pass.

    Not-a-number where there is one in the output: compare with `<=`, which is false then.
    """
    output, expected = output.to(torch.float32), expected.to(torch.float32)
    if not probabilities:
        return float((output - expected).abs().max()) / max(float(expected.abs().max()), _LEAST_PROBABILITY)
    if not bool(((output >= 0) & (output <= 1 + 1e-3)).all()):
        return float("nan")
    logits, expected_logits = (each.clamp_min(_LEAST_PROBABILITY).log() for each in (output, expected))
    spread = float(expected_logits.max() - expected_logits.min())
    return float((logits - expected_logits).abs().max()) / max(spread, 1.0)
