"""The versions of the model that are in service, and the numbers that they have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from multiworld_serving.server.predictor import ModelVersion
from multiworld_serving.server.versions.stage_plan import StagePlan

_NUMBERS_KEPT = 8
"""How many versions, including the current one, keep their number."""


@dataclass(frozen=True)
class VersionPlan:
    """One version of the model, cut into stages, ready to be sent to workers."""

    version: ModelVersion
    stages: tuple[StagePlan, ...]

    @property
    def number(self) -> int:
        """By which workers know it."""
        return self.version.number

    @property
    def key(self) -> str:
        """Its name in the scheduler."""
        return str(self.number)

    def stages_for(self, stage: int | None) -> tuple[StagePlan, ...]:
        """The stages that a worker of this stage must load; a spare (None) loads all stages."""
        return self.stages if stage is None else (self.stages[stage],)


class Loader(Protocol):
    """Loads further versions of a model."""

    def load(self, weights: str | None, versions: VersionTable) -> VersionPlan:
        """The version that an administrator names (None: that of the settings). Blocks.

        Raises:
            models.ModelError: it does not exist, is not allowed, invalid, or does not fit the service.
            MemoryError: there is not enough memory for another version.
        """
        ...


class VersionTable:
    """The current version, and the previous one until the requests that began with it have ended."""

    def __init__(self, first: VersionPlan) -> None:
        self.current = first
        self.retiring: VersionPlan | None = None
        self._numbers = {first.version.name: first.version.number}
        """Of the latest versions in service, by name; the current one is last."""
        self._last_number = first.version.number

    def number_of(self, name: str) -> int:
        """The number of a version for clients; allocates a new number for an unknown version.

        A new number is stored when the version goes into service.
        """
        if name not in self._numbers:
            self._last_number += 1
            return self._last_number
        return self._numbers[name]

    def plan(self, key: str) -> VersionPlan:
        """The plan in service with this key. Raises KeyError."""
        for plan in (self.current, self.retiring):
            if plan is not None and plan.key == key:
                return plan
        raise KeyError(key)

    def switch_to(self, plan: VersionPlan) -> list[ModelVersion]:
        """Make `plan` the current version and the current version the retiring one. Returns the versions that lose their number."""
        assert self.retiring is None, "the previous version is still retiring"
        self.retiring, self.current = self.current, plan
        self._numbers.pop(plan.version.name, None)
        self._numbers[plan.version.name] = plan.version.number
        oldest = list(self._numbers)[:-_NUMBERS_KEPT]
        return [ModelVersion(number=self._numbers.pop(name), name=name) for name in oldest]
