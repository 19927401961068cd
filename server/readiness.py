"""The error that says why the pipeline does not serve requests."""

from __future__ import annotations

from multiworld_serving.server.errors import DrainingError, NotReadyError, RequestRejected
from multiworld_serving.server.snapshots import PipelineSnapshot


def readiness_error(snapshot: PipelineSnapshot) -> RequestRejected:
    """The error that says what is missing."""
    if snapshot.draining:
        return DrainingError("the server is stopping and accepts no new requests; use another one")
    if snapshot.unloaded:
        return NotReadyError("the model is unloaded; an administrator must load it first")
    return NotReadyError(f"not ready: {'; '.join(snapshot.reasons)}; wait for workers to join")
