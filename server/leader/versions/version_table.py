"""The versions of the model that are in service, and the numbers that they have."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld_serving.common.service.predictor import ModelVersion
from multiworld_serving.server.leader.versions.stage_plan import StagePlan

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


class VersionTable:
    """The current version, and the previous one until the requests that began with it have ended."""

    def __init__(self, first: VersionPlan) -> None:
        self.current = first
        self.retiring: VersionPlan | None = None
        self._known = {first.version.name: first.version}
        """The latest versions in service, by name; the current one is last."""
        self._last_number = first.version.number
        self._agreed = first.version

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the versions in service, the current one first."""
        return (self.current.number, *([self.retiring.number] if self.retiring else []))

    def number_of(self, name: str) -> int:
        """The number of a version for clients; allocates a new number for an unknown version.

        A new number is stored when the version goes into service.
        """
        if name in self._known:
            return self._known[name].number
        if name == self._agreed.name and all(self._agreed.number != version.number for version in self._known.values()):
            return self._agreed.number
        self._last_number += 1
        return self._last_number

    def agree(self, version: ModelVersion) -> None:
        """Let this version get the number that it has at another leader, unless another version has it here."""
        self._agreed = version
        self._last_number = max(self._last_number, version.number)

    def digest_of(self, name: str) -> str | None:
        """The digest of a recent version; None if the name is new."""
        return self._known[name].digest if name in self._known else None

    def plan(self, key: str) -> VersionPlan:
        """The plan in service with this key. Raises KeyError."""
        for plan in (self.current, self.retiring):
            if plan is not None and plan.key == key:
                return plan
        raise KeyError(key)

    def switch_to(self, plan: VersionPlan) -> None:
        """Make `plan` the current version and the current version the retiring one."""
        assert self.retiring is None, "the previous version is still retiring"
        self.retiring, self.current = self.current, plan
        self._known.pop(plan.version.name, None)
        self._known[plan.version.name] = plan.version
        for name in list(self._known)[:-_NUMBERS_KEPT]:
            del self._known[name]
