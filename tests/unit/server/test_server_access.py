"""Authorization decisions, without a service."""

import base64
import hashlib

import pytest
from starlette.types import Scope

from multiworld_serving.common.config.keys import KeySet
from multiworld_serving.common.service.errors import ForbiddenError, UnauthenticatedError
from multiworld_serving.server.frontend.auth.authorizer import (
    ApiKeys,
    Authorizer,
    Permission,
    admin_port_permission,
    http_port_permission,
)

ALICE, OPS, TOKEN = b"key of alice", b"key of ops", b"join token"


def ring(name: str, key: bytes) -> KeySet:
    return KeySet({hashlib.sha256(key).digest(): name})


GUARDED = Authorizer(ApiKeys(ring("alice", ALICE), ring("ops", OPS)))
NO_ADMIN_KEYS = Authorizer(ApiKeys(ring("alice", ALICE), KeySet()))
OPEN = Authorizer(ApiKeys(KeySet(), KeySet()))


def scope(shown: bytes | None = None, method: str = "GET", client: str = "127.0.0.1", **headers: str) -> Scope:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    if shown is not None:
        pairs.append((b"authorization", b"Bearer " + shown))
    return {"type": "http", "method": method, "client": (client, 1), "headers": pairs}


HTTP_PORT = {
    Permission.NOTHING: ("/healthz", "/v2/health/ready", "/v2/models/m/versions/1/ready"),
    Permission.INFERENCE: (
        *("/predict", "", "/healthz/", "/HEALTHZ", "//healthz", "/healthz/../status"),
        *("/v2/models/a/b/ready", "/v2/models/m/ready\n"),
    ),
    Permission.ANY_KEY: ("/status", "/v2/repository/index"),
    Permission.ADMIN: ("/v2/repository/models/m/unload", "/v2/repository/models/m/load", "/admin/anything"),
}
ADMIN_PORT = {
    Permission.NOTHING: ("/metrics", "/status", "/predict", "/v2/models/m/infer"),
    Permission.ANY_KEY: ("/", "/events", "/status-page/main.js"),
    Permission.ADMIN: ("/admin/x", "/metrics/", "/v2/repository/models/m/load", "/v2/repository/index", "/x"),
}


def test_paths_need_their_permission_and_unknown_ones_a_key() -> None:
    for permission_of, paths in ((http_port_permission, HTTP_PORT), (admin_port_permission, ADMIN_PORT)):
        assert {need: tuple(path for path in paths[need] if permission_of(path) is need) for need in paths} == paths


@pytest.mark.parametrize(
    ("authorizer", "need", "shown", "outcome"),
    [
        (GUARDED, Permission.NOTHING, None, ""),
        (GUARDED, Permission.INFERENCE, ALICE, "alice"),
        (GUARDED, Permission.INFERENCE, OPS, ForbiddenError),
        (GUARDED, Permission.INFERENCE, TOKEN, UnauthenticatedError),
        (GUARDED, Permission.INFERENCE, None, UnauthenticatedError),
        (GUARDED, Permission.ANY_KEY, OPS, "ops"),
        (GUARDED, Permission.ANY_KEY, b"", UnauthenticatedError),
        (GUARDED, Permission.ADMIN, OPS, "ops"),
        (GUARDED, Permission.ADMIN, ALICE, ForbiddenError),
        (GUARDED, Permission.ADMIN, TOKEN, UnauthenticatedError),
        (GUARDED, Permission.ADMIN, None, UnauthenticatedError),
        (NO_ADMIN_KEYS, Permission.ADMIN, TOKEN, "this machine"),
        (NO_ADMIN_KEYS, Permission.ADMIN, ALICE, ForbiddenError),
        (OPEN, Permission.INFERENCE, None, ""),
        (OPEN, Permission.INFERENCE, b"whatever", ""),
        (OPEN, Permission.ADMIN, None, "this machine"),
    ],
)
def test_authorizer_admits_permitted_principals(
    authorizer: Authorizer, need: Permission, shown: bytes | None, outcome: object
) -> None:
    if isinstance(outcome, str):
        assert authorizer.check(need, scope(shown)) == (outcome, None)
        return
    assert isinstance(outcome, type)
    with pytest.raises(outcome):
        authorizer.check(need, scope(shown))


@pytest.mark.parametrize(
    "asked",
    [
        scope(client="10.0.0.7"),
        scope(client="not an address"),
        scope(origin="http://127.0.0.1:8002"),
        scope(sec_fetch_site="same-origin"),
        scope(x_forwarded_for="10.0.0.7"),
    ],
    ids=["another machine", "no address", "a page", "a browser", "a proxy"],
)
def test_without_admin_keys_admin_verbs_are_local_only(asked: Scope) -> None:
    with pytest.raises(ForbiddenError):
        OPEN.check(Permission.ADMIN, asked)


def basic(password: bytes) -> str:
    return "Basic " + base64.b64encode(b"anybody:" + password).decode()


def test_key_as_password_is_refused_for_admin_verbs_and_other_sites() -> None:
    assert GUARDED.check(Permission.ANY_KEY, scope(authorization=basic(ALICE)))[0] == "alice"
    same = scope(method="POST", authorization=basic(ALICE), sec_fetch_site="same-origin")
    assert GUARDED.check(Permission.INFERENCE, same)[0] == "alice"
    for asked in (
        scope(method="POST", authorization=basic(ALICE)),
        scope(method="POST", authorization=basic(ALICE), sec_fetch_site="cross-site"),
        scope(authorization="Basic !!!"),
        scope(authorization="Basic"),
    ):
        with pytest.raises(UnauthenticatedError):
            GUARDED.check(Permission.INFERENCE, asked)
    with pytest.raises(UnauthenticatedError):
        GUARDED.check(Permission.ADMIN, scope(authorization=basic(OPS)))
