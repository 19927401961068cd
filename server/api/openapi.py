"""The OpenAPI document of the HTTP API: `openapi.json`, completed with what depends on the model and the settings."""

from __future__ import annotations

import importlib.metadata
import json
from importlib.resources import files
from typing import Any

import msgspec

from multiworld_serving.server.api.inference import Inference
from multiworld_serving.server.predictor import ModelVersion
from multiworld_serving.server.snapshots import PipelineSnapshot


def openapi_document(
    inference: Inference, version: ModelVersion, *, has_handler: bool, needs_key: bool
) -> dict[str, Any]:
    """The document.

    Args:
        version: that serves now.
        has_handler: whether a handler decodes the bodies of /predict.
        needs_key: whether inference needs a key.
    """
    document: dict[str, Any] = json.loads((files("multiworld_serving.server.api") / "openapi.json").read_text("utf-8"))
    model, limits = inference.signature.model, inference.gate.limits
    document["info"]["version"] = importlib.metadata.version("multiworld-serving")
    if not needs_key:
        del document["security"]
    paths, components = document["paths"], document["components"]
    images, handler = paths.pop("/predict"), paths.pop("/predict with a handler")
    if has_handler or model.classifies_images:
        paths["/predict"] = handler if has_handler else images
    parameters = components["parameters"]
    parameters["model"]["schema"]["enum"] = [model.name]
    parameters["version"]["schema"]["enum"] = [str(version.number)]
    parameters["top_k"]["schema"] |= {"maximum": len(model.labels), "default": min(limits.top_k, len(model.labels))}
    inputs = components["requestBodies"]["infer"]["content"]["application/json"]["schema"]["properties"]["inputs"]
    inputs["items"]["properties"]["name"]["enum"] = [each.name for each in model.inputs]
    _, of_status = msgspec.json.schema_components([PipelineSnapshot], ref_template="#/components/schemas/{name}")
    components["schemas"] |= of_status
    return document
