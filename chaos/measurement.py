"""What a load generator has seen of a service, summed up. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from chaos.load import Load, Sample
from chaos.statistics import quantile

SHARES = (0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
_MOST_ERRORS = 5


@dataclass(frozen=True)
class Measurement:
    """The requests of a span of time, by when they were sent.

    Attributes:
        answered_per_s: right answers that came in this time, a second.
        latency_ms: of right answers, by name: "p50" … "max", and "mean"; empty when there are none.
        statuses: requests by HTTP status; "none" when there was no answer.
        errors: the most frequent ones, with how often.
        unsent: requests of an open loop that were due and not sent.
    """

    seconds: float
    requests: int
    answered: int
    refused: int
    failed: int
    unsent: int
    images_per_request: int
    answered_per_s: float
    latency_ms: dict[str, float]
    statuses: dict[str, int]
    errors: dict[str, int]

    @property
    def images_per_s(self) -> float:
        return self.answered_per_s * self.images_per_request

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "images_per_s": self.images_per_s}


def measured(
    samples: Sequence[Sample], since_s: float, until_s: float, *, unsent: int = 0, images_per_request: int = 1
) -> Measurement:
    """Sum up. What was sent before `since_s` is warm-up; what was sent before `until_s` counts, whenever it was answered."""
    seconds = max(1e-9, until_s - since_s)
    counted = [sample for sample in samples if since_s <= sample.sent_s <= until_s]
    right = [sample for sample in counted if not sample.failed and not sample.refused]
    in_time = sum(since_s <= s.done_s <= until_s and not s.failed and not s.refused for s in samples)
    failed = [sample for sample in counted if sample.failed]
    return Measurement(
        seconds=seconds,
        requests=len(counted),
        answered=len(right),
        refused=sum(sample.refused for sample in counted),
        failed=len(failed),
        unsent=unsent,
        images_per_request=images_per_request,
        answered_per_s=in_time / seconds,
        latency_ms=_latency_ms([sample.took_s for sample in right]),
        statuses=dict(Counter(str(sample.status or "none") for sample in counted)),
        errors=dict(Counter(sample.error for sample in failed).most_common(_MOST_ERRORS)),
    )


def lately(load: Load, now_s: float, seconds: float) -> Measurement:
    """What was answered in the last seconds, for a display; cheap however long it has gone on."""
    latest = load.samples[-_MOST_LATELY:]
    since_s = now_s - seconds
    done = [sample for sample in latest if sample.done_s >= since_s]
    return measured(done, min((sample.sent_s for sample in done), default=since_s), now_s)


_MOST_LATELY = 5000


def _latency_ms(times_s: Sequence[float]) -> dict[str, float]:
    if not times_s:
        return {}
    ordered = sorted(times_s)
    named = {f"p{100 * share:g}" if share < 1 else "max": 1e3 * quantile(ordered, share) for share in SHARES}
    return named | {"mean": 1e3 * sum(ordered) / len(ordered)}
