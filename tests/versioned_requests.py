"""Requests whose correct answer depends on the version or content of the model that computes it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx
import torch

from multiworld_serving.testing.load.requests import ReferenceRequest
from tests.e2e.images import png


@dataclass(frozen=True)
class VersionedRequest(ReferenceRequest):
    """Attributes:
    version_header: header of a response that names its version.
    answers: the expected answer by the beginning of the version's name.
    seen: number of responses, by version.
    """

    version_header: str = "x-model-version"
    answers: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    def find_error(self, answer: httpx.Response, request_id: str) -> str:
        """Return why this is not what its version answers; empty if it is."""
        if answer.status_code != 200:
            return answer.text[:200]
        version = next(name for name in self.answers if answer.headers[self.version_header].startswith(name))
        self.seen[version] += 1
        return ReferenceRequest(b"", expected=self.answers[version]).find_error(answer, request_id)


def versioned_requests(
    images: torch.Tensor, probabilities: Mapping[str, torch.Tensor], version_header: str
) -> Sequence[VersionedRequest]:
    """A request for each image, uint8 [N,3,S,S], with its probabilities, [N,C], by version. They share `seen`."""
    seen: Counter[str] = Counter()
    return [
        VersionedRequest(
            png(image),
            "image/png",
            version_header=version_header,
            answers=best_classes(probabilities, number),
            seen=seen,
        )
        for number, image in enumerate(images)
    ]


def best_classes(probabilities: Mapping[str, torch.Tensor], number: int) -> dict[str, dict[int, float]]:
    """The most probable classes of an image, by version."""
    found = {version: rows[number].topk(2) for version, rows in probabilities.items()}
    return {
        version: dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)) for version, best in found.items()
    }
