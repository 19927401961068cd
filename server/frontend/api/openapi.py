"""The OpenAPI document of the HTTP API: `openapi.json`, completed with what depends on the model and the settings."""

from __future__ import annotations

import importlib.metadata
import json
from importlib.resources import files
from typing import Any

import msgspec

from multiworld_serving.common.service.snapshots import PipelineSnapshot
from multiworld_serving.server.frontend.api.groups import Groups
from multiworld_serving.server.frontend.http.limits import RequestLimits


def openapi_document(groups: Groups, *, needs_key: bool) -> dict[str, Any]:
    """The document.

    Args:
        groups: the models that serve now.
        needs_key: whether inference needs a key.
    """
    document: dict[str, Any] = json.loads(
        (files("multiworld_serving.server.frontend.api") / "openapi.json").read_text("utf-8")
    )
    described = [(group, group.inference) for group in groups if group.inference is not None]
    models = [inference.signature.model for _, inference in described]
    document["info"]["version"] = importlib.metadata.version("multiworld-serving")
    if not needs_key:
        del document["security"]
    paths, components = document["paths"], document["components"]
    images, handler = paths.pop("/predict"), paths.pop("/predict with a handler")
    able = [group for group, _ in described if group.serves_predict]
    named = {f"_{group.name}": group for group in able if len(able) > 1}
    for suffix, group in ({"": groups.of_predict} | named).items():
        if group in able:
            operation = (handler if group.has_handler else images)["post"]
            paths["/predict" + suffix.replace("_", "/", 1)] = {"post": operation | {"operationId": f"predict{suffix}"}}
    parameters = components["parameters"]
    parameters["model"]["schema"]["enum"] = groups.names
    parameters["version"]["schema"]["enum"] = sorted({str(group.pool.version.number) for group, _ in described})
    labels = max((len(model.labels) for model in models), default=0)
    parameters["top_k"]["schema"] |= {"maximum": labels, "default": min(RequestLimits.top_k, labels)}
    inputs = components["requestBodies"]["infer"]["content"]["application/json"]["schema"]["properties"]["inputs"]
    inputs["items"]["properties"]["name"]["enum"] = sorted({each.name for model in models for each in model.inputs})
    _, of_status = msgspec.json.schema_components([PipelineSnapshot], ref_template="#/components/schemas/{name}")
    components["schemas"] |= of_status
    return document
