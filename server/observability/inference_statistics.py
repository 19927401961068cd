"""Statistics of inference since the start, as defined by the Open Inference Protocol."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from multiworld_serving.server.predictor import Prediction

_PHASES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


class ImageTimes(NamedTuple):
    """Times of one image, as in `Prediction`."""

    queue_s: float
    compute_s: float
    transfer_s: float
    batch_size: int


class InferenceTimes(NamedTuple):
    """Times of one request, as in `Inference`."""

    images: tuple[ImageTimes, ...]
    input_s: float
    output_s: float


@dataclass(frozen=True)
class Inference:
    """What was measured for one request.

    Attributes:
        predictions: predictions, one per image, at least one.
        input_s: seconds to parse and decode the images.
        output_s: seconds to serialize the response.
    """

    predictions: Sequence[Prediction]
    input_s: float
    output_s: float

    @property
    def times(self) -> InferenceTimes:
        """The times without the predictions."""
        images = (ImageTimes(x.queue_s, x.compute_s, x.transfer_s, x.batch_size) for x in self.predictions)
        return InferenceTimes(tuple(images), self.input_s, self.output_s)


@dataclass
class _Duration:
    """Count and total seconds of an action."""

    count: float = 0.0
    seconds: float = 0.0

    def add(self, seconds: float, *, count: float = 1.0) -> None:
        self.count += count
        self.seconds += seconds

    def as_json(self) -> dict[str, int]:
        return {"count": round(self.count), "ns": round(self.seconds * 1e9)}


@dataclass
class _BatchTimes:
    """Times of batches of one size. Each image of a batch contributes an equal share."""

    transfer: _Duration = field(default_factory=_Duration)
    compute: _Duration = field(default_factory=_Duration)
    output: _Duration = field(default_factory=_Duration)


class Statistics:
    """Sums over the inference requests of both protocols. Not thread-safe: for the event loop only."""

    def __init__(self) -> None:
        self._last_unix_s = 0.0
        self._images = 0
        self._executions = 0.0
        self._phases = {phase: _Duration() for phase in _PHASES}
        self._batches: defaultdict[int, _BatchTimes] = defaultdict(_BatchTimes)

    def request_finished(self, times: InferenceTimes | None, duration_s: float) -> None:
        """Add a request that ended after `duration_s`. `times` is None if it failed."""
        self._last_unix_s = time.time()
        if times is None:
            self._phases["fail"].add(duration_s)
            return
        # Images are processed in parallel: the slowest one determines the request's time.
        slowest = max(times.images, key=lambda image: image.queue_s + image.compute_s + image.transfer_s)
        self._phases["success"].add(duration_s)
        self._phases["queue"].add(slowest.queue_s)
        self._phases["compute_input"].add(times.input_s + slowest.transfer_s)
        self._phases["compute_infer"].add(slowest.compute_s)
        self._phases["compute_output"].add(times.output_s)
        for image in times.images:
            self._add_image(image, times.output_s / len(times.images))

    def _add_image(self, image: ImageTimes, output_s: float) -> None:
        share = 1 / image.batch_size
        self._images += 1
        self._executions += share
        batches = self._batches[image.batch_size]
        batches.transfer.add(image.transfer_s * share, count=share)
        batches.compute.add(image.compute_s * share, count=share)
        batches.output.add(output_s, count=share)  # each image's output is serialized separately

    def as_json(self, model: str, version: str) -> dict[str, Any]:
        """One element of `model_stats`."""
        return {
            "name": model,
            "version": version,
            "last_inference": round(self._last_unix_s * 1e3),
            "inference_count": self._images,
            "execution_count": round(self._executions),
            "inference_stats": {phase: duration.as_json() for phase, duration in self._phases.items()},
            "response_stats": {},
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": self._batches[size].transfer.as_json(),
                    "compute_infer": self._batches[size].compute.as_json(),
                    "compute_output": self._batches[size].output.as_json(),
                }
                for size in sorted(self._batches)
            ],
            "memory_usage": [],
        }
