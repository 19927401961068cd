"""What POST /v2/repository/index answers, on the port of inference and on that of the operators."""

from __future__ import annotations

from server.operations_routes import why_not_ready
from server.predictor import PipelineSnapshot


def repository_index(snapshot: PipelineSnapshot, *, only_ready: bool = False) -> list[dict[str, str]]:
    """The one model in the version that serves, and whether it does; another one while it is on its way."""
    here = {"name": snapshot.model, "version": str(snapshot.version_number)}
    if snapshot.ready:
        versions = [here | {"state": "READY", "reason": ""}]
    else:
        reason = "unloaded" if snapshot.unloaded else why_not_ready(snapshot).detail
        versions = [here | {"state": "UNAVAILABLE", "reason": reason}]
    if snapshot.version_loading is not None:
        versions.append({"name": snapshot.model, "version": "", "state": "LOADING", "reason": snapshot.version_loading})
    return [version for version in versions if version["state"] == "READY" or not only_ready]
