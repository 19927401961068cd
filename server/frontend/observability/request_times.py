"""Sums of the times of requests, as the statistics extension of the Open Inference Protocol reports them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Times:
    """Sums of requests with the same outcome, or of batches of the same size, to which each image contributes an equal share."""

    count: float = 0
    total_s: float = 0.0
    queue_s: float = 0.0
    input_s: float = 0.0
    compute_s: float = 0.0
    output_s: float = 0.0


def phases(times: Times, outputs: float) -> dict[str, dict[str, int]]:
    """The times of input, computing and output; `outputs` is the number of outputs."""
    return {
        "compute_input": duration(times.count, times.input_s),
        "compute_infer": duration(times.count, times.compute_s),
        "compute_output": duration(outputs, times.output_s),
    }


def duration(count: float, seconds: float) -> dict[str, int]:
    """A number of events and the sum of their times."""
    return {"count": round(count), "ns": round(seconds * 1e9)}
