"""The names of the versions of a model that serve side by side. No torch."""

import re
from collections.abc import Iterable
from typing import Literal

Share = float | Literal["shadow"]
"""Percentage of the requests of a model. "shadow": a copy of each request, and no client gets its response."""


def model_and_version(name: str) -> tuple[str, int]:
    """Split NAME@VERSION. NAME alone is version 1."""
    match = re.fullmatch(r"(.+)@([1-9][0-9]{0,8})", name) if "@" in name else None  # for each request
    return (name, 1) if match is None else (match[1], int(match[2]))


def versions_of(model: str, names: Iterable[str]) -> list[str]:
    """Those of the names that are versions of this model."""
    return [name for name in names if model_and_version(name)[0] == model]
