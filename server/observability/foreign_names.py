"""The metrics of requests under the names of other servers, so that existing dashboards work.

Sources: Triton's `nv_inference_…` (docs/user_guide/metrics.md of triton-inference-server/server) and KServe's `request_…_seconds`
(python/kserve/kserve/metrics.py of kserve/kserve).
"""

from __future__ import annotations

from multiworld_serving.common.metrics.families import Histogram, NumberFamily, Untyped
from multiworld_serving.server.observability.inference_statistics import InferenceTimes

_LABELS = ("model", "version")
_TRITON = {
    "request_success": "Requests that were answered.",
    "request_failure": "Requests that failed.",
    "count": "Images that were answered.",
    "exec_count": "Batches at the last stage.",
    "request_duration_us": "Sum of the times of answered requests.",
    "queue_duration_us": "Sum of the times in queues of answered requests.",
    "compute_input_duration_us": "Sum of the times of decoding and of transfers.",
    "compute_infer_duration_us": "Sum of the times of computing.",
    "compute_output_duration_us": "Sum of the times of writing answers.",
}
_KSERVE = {
    "preprocess": "Decoding of the images of a request.",
    "predict": "Prediction of a request: queues, computing and transfers.",
    "postprocess": "Writing of an answer.",
}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)


class ForeignNames:
    """The families of one frontend, empty until the first request."""

    def __init__(self) -> None:
        self._triton = {name: Untyped(f"nv_inference_{name}", text, _LABELS) for name, text in _TRITON.items()}
        self._kserve = {
            name: Histogram(f"request_{name}_seconds", text, _SECONDS, ("model_name",))
            for name, text in _KSERVE.items()
        }

    @property
    def families(self) -> list[NumberFamily | Histogram]:
        """All families, for the exposition."""
        return [*self._triton.values(), *self._kserve.values()]

    def request_ended(self, model: str, version: str, duration_s: float, times: InferenceTimes | None) -> None:
        """An inference request has ended; `times` is None if it failed."""
        if times is None:
            self._triton["request_failure"].labels(model, version).inc()
            return
        slowest = max(times.images, key=lambda image: image.queue_s + image.compute_s + image.transfer_s)
        added = {
            "request_success": 1,
            "count": len(times.images),
            "exec_count": sum(1 / image.batch_size for image in times.images),
            "request_duration_us": duration_s * 1e6,
            "queue_duration_us": slowest.queue_s * 1e6,
            "compute_input_duration_us": (times.input_s + slowest.transfer_s) * 1e6,
            "compute_infer_duration_us": slowest.compute_s * 1e6,
            "compute_output_duration_us": times.output_s * 1e6,
        }
        for name, amount in added.items():
            self._triton[name].labels(model, version).inc(amount)
        predict_s = slowest.queue_s + slowest.compute_s + slowest.transfer_s
        for name, seconds in (("preprocess", times.input_s), ("predict", predict_s), ("postprocess", times.output_s)):
            self._kserve[name].labels(model).observe(seconds)

    def version_retired(self, version: str) -> None:
        """Remove the series of an earlier version."""
        for family in self._triton.values():
            family.remove(lambda values: values[1] == version)
