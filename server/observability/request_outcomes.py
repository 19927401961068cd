"""Counts the outcomes of inference requests once, for Prometheus, the status page and the statistics of the Open Inference Protocol."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from multiworld_serving.common.metrics import derived_family
from multiworld_serving.common.observers import suppress_errors
from multiworld_serving.server.observability.request_record import Inference, InferenceProtocol, RequestRecord

# Bucket bounds in seconds, dense around typical values and above the timeout that bounds the wait.
# fmt: off
_REQUEST_S = (
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 1, 2.5, 5, 10, 30, 60,  # timeout_s: 30
)
# fmt: on
MAX_VERSIONS = 8
"""Versions whose series are kept, as leaders keep the numbers of the latest eight."""
_FORGOTTEN = ""
"""Stands for all earlier versions, which are not exported."""
_MAX_DURATIONS = 10_000
_NOT_FOR_THE_MODEL = (404, 405)


@dataclass(slots=True)
class _Sums:
    """Sums over requests with the same outcome, or over batches of the same size, of which each image contributes an equal share.

    Images of a request are processed in parallel: the slowest one determines the times of the request.
    """

    count: float = 0
    images: int = 0
    total_s: float = 0.0
    queue_s: float = 0.0
    input_s: float = 0.0
    compute_s: float = 0.0
    output_s: float = 0.0

    def add(self, other: _Sums) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class RequestOutcomes(Collector):
    """All inference requests of one frontend. For the event loop's thread only.

    Args:
        registry: for the distribution of the durations.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._in_flight = 0
        self._model = ""
        self._protocols: Sequence[InferenceProtocol] = ()
        self._codes: Mapping[str, int] = {}
        self._outcomes: dict[tuple[str, str, int, str], _Sums] = {}
        """By version, protocol, status and reason."""
        self._versions: list[str] = []
        """The latest last."""
        self._last_unix_s = 0.0
        self._batches: dict[int, _Sums] = {}
        """By size."""
        self._recent_s: deque[float] = deque(maxlen=_MAX_DURATIONS)
        self._durations: dict[tuple[str, int], Histogram] = {}
        self._duration = Histogram(
            "multiworld_request_duration_seconds",
            "Time from the first byte of the request to the last byte of the response, by outcome.",
            ("model", "protocol", "code"),
            buckets=_REQUEST_S,
            registry=registry,
        )

    def declare(
        self, model: str, version: str, protocols: Sequence[InferenceProtocol], codes: Mapping[str, int]
    ) -> None:
        """Create the series of the possible outcomes with value 0, so that the first one is an increase.

        Args:
            codes: HTTP status by reason, including that of success.
        """
        self._model, self._protocols, self._codes = model, protocols, codes
        self._use(version)

    @suppress_errors
    def started(self) -> None:
        """A request has started."""
        self._in_flight += 1

    @suppress_errors
    def ended(self, record: RequestRecord) -> None:
        """A request has ended."""
        self._in_flight -= 1
        protocol, code, duration_s = record.protocol or "", record.status, record.duration_s
        if code not in _NOT_FOR_THE_MODEL:
            self._last_unix_s = time.time()
        if self._versions[-1:] != [record.version]:
            self._use(record.version)
        key = (record.version, protocol, code, record.reason)
        outcome = self._outcomes.get(key) or self._outcomes.setdefault(key, _Sums())
        outcome.count += 1
        outcome.total_s += duration_s
        if code == 200:
            self._recent_s.append(duration_s)
            if record.inference is not None:
                self._add_times(outcome, record.inference)
        self._duration_of(protocol, code).observe(duration_s)

    def _duration_of(self, protocol: str, code: int) -> Histogram:
        found = self._durations.get((protocol, code))
        if found is None:
            found = self._durations[protocol, code] = self._duration.labels(self._model, protocol, code)
        return found

    def _use(self, version: str) -> None:
        """Note that this version is the latest one, and merge the outcomes of the version that was used longest ago."""
        if version in self._versions:
            self._versions.remove(version)
        else:
            for protocol in self._protocols:
                self._duration_of(protocol, 200)
                for reason, code in self._codes.items():
                    self._outcomes.setdefault((version, protocol, code, reason), _Sums())
        self._versions.append(version)
        if len(self._versions) > MAX_VERSIONS:
            former = self._versions.pop(0)
            for key in [key for key in self._outcomes if key[0] == former]:
                outcome = self._outcomes.pop(key)
                self._outcomes.setdefault((_FORGOTTEN, *key[1:]), _Sums()).add(outcome)

    def _add_times(self, outcome: _Sums, inference: Inference) -> None:
        predictions = inference.predictions
        output_s = inference.output_s / len(predictions)
        for image in predictions:
            share = 1 / image.batch_size
            batch = self._batches.get(image.batch_size) or self._batches.setdefault(image.batch_size, _Sums())
            batch.count += share
            batch.input_s += image.transfer_s * share
            batch.compute_s += image.compute_s * share
            batch.output_s += output_s  # each image's output is serialized separately
        slowest = max(predictions, key=lambda image: image.queue_s + image.compute_s + image.transfer_s)
        outcome.images += len(predictions)
        outcome.queue_s += slowest.queue_s
        outcome.input_s += inference.input_s + slowest.transfer_s
        outcome.compute_s += slowest.compute_s
        outcome.output_s += inference.output_s

    # For the status page

    def statuses(self) -> Tally[str]:
        """The number of requests since the start, by the first digit of the status."""
        codes: Tally[str] = Tally()
        for (_, _, code, _), outcome in self._outcomes.items():
            codes[str(code)[0]] += round(outcome.count)
        return codes

    def take_durations(self) -> list[float]:
        """Durations in seconds of the responses since the last call, at most the latest 10,000. For one caller."""
        taken = list(self._recent_s)
        self._recent_s.clear()
        return taken

    # For Prometheus

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        exported = {key: outcome for key, outcome in self._outcomes.items() if key[0] != _FORGOTTEN}
        labels = ("model", "version", "protocol", "code", "reason")
        requests = [((self._model, *key), outcome.count) for key, outcome in exported.items()]
        yield derived_family("counter", "requests", "Inference requests completed, by outcome.", labels, requests)
        images: Tally[str] = Tally()
        for (version, *_), outcome in exported.items():
            images[version] += outcome.images
        answered = [((self._model, version), count) for version, count in images.items()]
        says = "Images in answered inference requests."
        yield derived_family("counter", "images", says, ("model", "version"), answered)
        in_flight = [((), max(0, self._in_flight))]
        yield derived_family("gauge", "requests_in_flight", "Inference requests in flight.", (), in_flight)

    # For the Open Inference Protocol

    def statistics(self, version: str) -> dict[str, Any]:
        """One element of `model_stats`: sums since the start, over all versions."""
        success, fail = _Sums(), _Sums()
        for (_, _, code, _), outcome in self._outcomes.items():
            if code not in _NOT_FOR_THE_MODEL:
                (success if code == 200 else fail).add(outcome)
        return {
            "name": self._model,
            "version": version,
            "last_inference": round(self._last_unix_s * 1e3),
            "inference_count": success.images,
            "execution_count": round(sum(batches.count for batches in self._batches.values())),
            "inference_stats": {
                "success": _duration(success.count, success.total_s),
                "fail": _duration(fail.count, fail.total_s),
                "queue": _duration(success.count, success.queue_s),
                "compute_input": _duration(success.count, success.input_s),
                "compute_infer": _duration(success.count, success.compute_s),
                "compute_output": _duration(success.count, success.output_s),
                "cache_hit": _duration(0, 0),
                "cache_miss": _duration(0, 0),
            },
            "response_stats": {},
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": _duration(batches.count, batches.input_s),
                    "compute_infer": _duration(batches.count, batches.compute_s),
                    "compute_output": _duration(batches.count * size, batches.output_s),
                }
                for size, batches in sorted(self._batches.items())
            ],
            "memory_usage": [],
        }


def _duration(count: float, seconds: float) -> dict[str, int]:
    return {"count": round(count), "ns": round(seconds * 1e9)}
