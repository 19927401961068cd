"""Administrative operations, as frontends and leaders both see them: their steps and their errors.

Frontends do not import what performs the operations (`leader.py`): it loads the model's code, which takes time and memory.
"""

from __future__ import annotations

from typing import NamedTuple

from multiworld_serving.common.service.errors import RequestRejected
from multiworld_serving.common.service.predictor import ModelVersion


class OperationInProgressError(RequestRejected, reason="busy", status=409):
    """Another operation is in progress. Nothing has changed; try again when it has ended."""


class InvalidWeightsError(RequestRejected, reason="invalid_weights", status=400):
    """The leader cannot load these weights: it raised a `models.ModelError` with the same message. Nothing has changed."""


class VersionFailedError(RequestRejected, reason="version_failed", status=500):
    """The workers cannot serve this version. Nothing has changed."""


class RestartFailedError(RequestRejected, reason="restart_failed", status=500):
    """A worker did not leave, or did not join again. The message names the workers that were not restarted."""


class DrainError(RequestRejected, reason="not_drained", status=409):
    """A host still serves, because no other one has a ready replica of a stage."""


class Desired(NamedTuple):
    """What the leaders of a group are to serve. An operation on the acting leader decides it, and the other leaders follow."""

    revision: int
    """Number of the operation; 0: the version of the settings. The highest one wins."""
    version: ModelVersion
    weights: str | None = None
    """With which the version is loaded; None: the weights of the settings."""
    unloaded: bool = False
    drained: tuple[str, ...] = ()
    """The hosts whose workers may not serve."""

    @property
    def rank(self) -> tuple[int, str]:
        """Orders what was decided. Operations on the two sides of a cut network have the same revision: then the name decides."""
        return self.revision, self.version.name
