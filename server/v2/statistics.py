"""What inference has taken since the start, as the statistics of the Open Inference Protocol count it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from server.predictor import Answer

_PHASES = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


class ImageTimes(NamedTuple):
    """What one image took, as in `Answer`."""

    queue_s: float
    compute_s: float
    transfer_s: float
    batch_size: int


class InferenceTimes(NamedTuple):
    """What one request took, as in `Inference`."""

    images: tuple[ImageTimes, ...]
    input_s: float
    output_s: float


@dataclass(frozen=True)
class Inference:
    """What one request took until its answer was made.

    Attributes:
        answers: one an image, at least one.
        input_s: seconds for making images of what the client sent.
        output_s: seconds for making the body of the answer.
    """

    answers: Sequence[Answer]
    input_s: float
    output_s: float

    @property
    def times(self) -> InferenceTimes:
        """Without the answers themselves."""
        images = (ImageTimes(x.queue_s, x.compute_s, x.transfer_s, x.batch_size) for x in self.answers)
        return InferenceTimes(tuple(images), self.input_s, self.output_s)


@dataclass
class _Duration:
    """How often something was done, and the seconds that it took all together."""

    count: float = 0.0
    seconds: float = 0.0

    def add(self, seconds: float, *, count: float = 1.0) -> None:
        self.count += count
        self.seconds += seconds

    def as_json(self) -> dict[str, int]:
        return {"count": round(self.count), "ns": round(self.seconds * 1e9)}


@dataclass
class _BatchTimes:
    """Batches of one size. Each of a batch's images brings its share of it."""

    transfer: _Duration = field(default_factory=_Duration)
    compute: _Duration = field(default_factory=_Duration)
    output: _Duration = field(default_factory=_Duration)


class Statistics:
    """Sums over all inference requests, whichever protocol they came by. Not thread-safe: the event loop's."""

    def __init__(self) -> None:
        self._last_unix_s = 0.0
        self._images = 0
        self._executions = 0.0
        self._phases = {phase: _Duration() for phase in _PHASES}
        self._batches: defaultdict[int, _BatchTimes] = defaultdict(_BatchTimes)

    def request_finished(self, times: InferenceTimes | None, duration_s: float) -> None:
        """A request has ended, so long after it came; None when it got no answer."""
        self._last_unix_s = time.time()
        if times is None:
            self._phases["fail"].add(duration_s)
            return
        # The images travel side by side: the request waited for this one.
        slowest = max(times.images, key=lambda image: image.queue_s + image.compute_s + image.transfer_s)
        self._phases["success"].add(duration_s)
        self._phases["queue"].add(slowest.queue_s)
        self._phases["compute_input"].add(times.input_s + slowest.transfer_s)
        self._phases["compute_infer"].add(slowest.compute_s)
        self._phases["compute_output"].add(times.output_s)
        for image in times.images:
            self._image_answered(image, times.output_s / len(times.images))

    def _image_answered(self, image: ImageTimes, output_s: float) -> None:
        share = 1 / image.batch_size
        self._images += 1
        self._executions += share
        batches = self._batches[image.batch_size]
        batches.transfer.add(image.transfer_s * share, count=share)
        batches.compute.add(image.compute_s * share, count=share)
        batches.output.add(output_s, count=share)  # each image's answer is written by itself

    def as_json(self, model: str, version: str) -> dict[str, Any]:
        """One member of `model_stats`."""
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
