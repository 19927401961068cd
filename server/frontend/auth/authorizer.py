"""Authorization: which key a request needs, and whether it has one.

There are inference keys and admin keys; no key is both. Without inference keys, inference needs no authentication. Without
admin keys, admin endpoints accept only requests from this machine that do not come from a browser or a proxy. The join token never
travels over HTTP.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from dataclasses import dataclass
from enum import Enum

from starlette.datastructures import Headers
from starlette.types import Scope

from multiworld_serving.common.config.keys import KeySet
from multiworld_serving.common.service.errors import ForbiddenError, UnauthenticatedError


class Permission(Enum):
    """What a path requires."""

    NOTHING = "nothing"
    ANY_KEY = "any key"
    INFERENCE = "an inference key"
    ADMIN = "an admin key"


_OPEN = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
_OPEN_MODEL = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/ready")
_READ_ONLY = frozenset({"/", "/status", "/events", "/metrics", "/openapi.json", "/v2/repository/index"})


def http_port_permission(path: str) -> Permission:
    """The permission for a path of the HTTP port. Unknown paths require an inference key."""
    if path in _OPEN or _OPEN_MODEL.fullmatch(path):
        return Permission.NOTHING
    if path in _READ_ONLY or path.startswith("/status-page/"):
        return Permission.ANY_KEY
    if is_admin_path(path):
        return Permission.ADMIN
    return Permission.INFERENCE


def is_admin_path(path: str) -> bool:
    """Whether this is a path of the admin port only."""
    return path.startswith(("/admin/", "/v2/repository/"))


def is_inference_path(path: str) -> bool:
    """Whether this is a path of the HTTP API only."""
    return path in {"/predict", "/status", "/events", "/openapi.json"} or path.startswith(
        ("/predict/", "/v1/", "/v2/models", "/v2/health")
    )


def admin_port_permission(path: str) -> Permission:
    """The permission for a path of the admin port: an admin key, except for the status page, metrics, probes and paths of the HTTP API."""
    if path in {"/", "/events"} or path.startswith("/status-page/"):
        return Permission.ANY_KEY
    known = path in {"/metrics", "/healthz", "/readyz"}
    return Permission.NOTHING if known or is_inference_path(path) else Permission.ADMIN


@dataclass(frozen=True)
class ApiKeys:
    """The configured keys.

    Attributes:
        inference: empty = inference needs no key.
        admin: empty = admin endpoints accept requests from this machine only.
    """

    inference: KeySet
    admin: KeySet


class Authorizer:
    """Checks permissions. `keys` may be replaced while it is in use."""

    def __init__(self, keys: ApiKeys) -> None:
        self.keys = keys

    def check(self, permission: Permission, scope: Scope) -> tuple[str, frozenset[str] | None]:
        """Check the permission of a request.

        Returns:
            Name of the key's holder, empty if no authentication is required; and the models that the key permits, None for all.
        Raises:
            UnauthenticatedError: no key, or an unknown one.
            ForbiddenError: the key does not have this permission.
        """
        if permission is Permission.NOTHING or (permission is not Permission.ADMIN and not self.keys.inference):
            return "", None
        headers = Headers(scope=scope)
        if permission is Permission.ADMIN:
            return self._check_admin(scope, headers), None
        admin, user = self._holders(_presented_key(headers, scope["method"]))
        if admin is not None and permission is Permission.INFERENCE:
            raise ForbiddenError("an admin key does not permit inference; send a key of --api-keys-file")
        if (name := admin or user) is None:
            raise UnauthenticatedError(_KEY_REQUIRED)
        return name, self.keys.inference.models.get(name)

    def _check_admin(self, scope: Scope, headers: Headers) -> str:
        admin, user = self._holders(_bearer(headers))
        if admin is not None:
            return admin
        if user is not None:
            raise ForbiddenError("an inference key does not permit admin requests; send a key of --admin-keys-file")
        if self.keys.admin:
            raise UnauthenticatedError("no valid admin key; send one as `Authorization: Bearer KEY`")
        is_local = scope["client"] is not None and is_loopback(scope["client"][0])
        if not is_local or any(name in headers for name in _BROWSER_AND_PROXY_HEADERS):
            raise ForbiddenError(
                "without admin keys (--admin-keys-file), the service accepts admin requests only from programs on its own machine"
            )
        return "this machine"

    def _holders(self, presented: bytes | None) -> tuple[str | None, str | None]:
        """The names of the administrator and of the user with this key."""
        if presented is None:
            return None, None
        return self.keys.admin.name_of(presented), self.keys.inference.name_of(presented)


_BROWSER_AND_PROXY_HEADERS = ("origin", "sec-fetch-site", "via", "forwarded", "x-forwarded-for", "x-real-ip")
"""Headers that browsers and proxies send: a local request with one of them may originate elsewhere."""
_KEY_REQUIRED = "this service requires a key; send it as `Authorization: Bearer KEY`"


def _bearer(headers: Headers) -> bytes | None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip().encode("latin-1") if scheme.lower() == "bearer" else None


def _presented_key(headers: Headers, method: str) -> bytes | None:
    """The key in a request: bearer token, or a browser's password unless another site's page caused the request."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return _bearer(headers)
    if method not in {"GET", "HEAD"} and headers.get("sec-fetch-site") != "same-origin":
        return None
    try:
        return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return None


def is_loopback(host: str) -> bool:
    """Whether this address can be reached from its own machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
