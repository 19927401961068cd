"""What the OpenAPI document says of keys."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from server.access import Need, need_on_http_port
from server.http_errors import DESCRIPTIONS

_SCHEME = "key"
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
_CHALLENGE = {"WWW-Authenticate": {"description": "How to show a key.", "schema": {"type": "string"}}}


def document_keys(app: FastAPI) -> None:
    """Have the document say which paths need a key, and what they answer without one."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            _describe(plain())
        return plain()

    app.openapi = described  # type: ignore[method-assign]  # as FastAPI would have it done


def _describe(document: dict[str, Any]) -> None:
    scheme = {"type": "http", "scheme": "bearer", "description": "A key of --api-keys-file, or of --admin-keys-file."}
    document.setdefault("components", {})["securitySchemes"] = {_SCHEME: scheme}
    for path, operations in document["paths"].items():
        if need_on_http_port(path) is Need.NOTHING:
            continue
        for operation in operations.values():
            operation["security"] = [{_SCHEME: []}]
            operation["responses"]["401"] = {"description": DESCRIPTIONS[401], "content": _ERROR, "headers": _CHALLENGE}
            operation["responses"]["403"] = {"description": DESCRIPTIONS[403], "content": _ERROR}
