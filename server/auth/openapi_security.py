"""Describes authentication in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from multiworld_serving.server.auth.authorizer import Permission, http_port_permission
from multiworld_serving.server.http.errors import DESCRIPTIONS

_SCHEME = "key"
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
_CHALLENGE = {"WWW-Authenticate": {"description": "How to send a key.", "schema": {"type": "string"}}}


def document_authentication(app: FastAPI) -> None:
    """Add to the OpenAPI document which paths require a key, and their 401 and 403 responses."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            _describe(plain())
        return plain()

    app.openapi = described  # type: ignore[method-assign]  # the way that FastAPI documents


def _describe(document: dict[str, Any]) -> None:
    scheme = {"type": "http", "scheme": "bearer", "description": "A key of --api-keys-file or --admin-keys-file."}
    document.setdefault("components", {})["securitySchemes"] = {_SCHEME: scheme}
    for path, operations in document["paths"].items():
        if http_port_permission(path) is Permission.NOTHING:
            continue
        for operation in operations.values():
            operation["security"] = [{_SCHEME: []}]
            operation["responses"]["401"] = {"description": DESCRIPTIONS[401], "content": _ERROR, "headers": _CHALLENGE}
            operation["responses"]["403"] = {"description": DESCRIPTIONS[403], "content": _ERROR}
