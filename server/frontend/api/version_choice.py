"""Which version of a model gets a request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

from starlette.types import Scope

_GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it, modulo 1, are spread evenly: after any number of requests, each version has its share of them, plus or minus a few."""


class VersionChoice:
    """Chooses a version for each request of a frontend.

    Args:
        header: requests with the same value of this header go to the same version; None = no header counts.
    """

    def __init__(self, header: str | None) -> None:
        self._header = header and header.lower().encode()
        self._last: dict[str, float] = {}

    def place(self, model: str, scope: Scope) -> float:
        """The place of a request in the interval from 0 to 1, which the versions divide."""
        if self._header:
            for name, value in scope["headers"]:
                if name == self._header:
                    digest = blake2b(model.encode() + b"\0" + value, digest_size=8).digest()
                    return int.from_bytes(digest) / 2**64
        self._last[model] = place = (self._last.get(model, random.random()) + _GOLDEN_RATIO) % 1
        return place


def version_at(place: float, shares: Sequence[float], usable: Sequence[bool]) -> int:
    """The index of the version at this place.

    If it cannot be used, the place within its part chooses among the others in proportion to their shares. So only its own clients
    change to another version. If no version can be used, it is the one at this place.
    """
    left, first = list(range(len(shares))), -1
    while left:
        parts = [each for each in left if shares[each] > 0] or left
        total = sum(shares[each] for each in parts)
        for chosen in parts:
            size = shares[chosen] / total if total else 1 / len(parts)
            if place < size:
                break
            place -= size
        if usable[chosen]:
            return chosen
        first = chosen if first < 0 else first
        left.remove(chosen)
        place = min(place / size, 1.0)
    return first
