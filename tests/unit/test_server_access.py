"""Who is let in where, decided without a service."""

import base64
import hashlib

import pytest
from starlette.types import Scope

from config.keys import Key, KeyRing
from server.access import Gate, Need, Rings, need_on_http_port, need_on_operators_port
from server.errors import ForbiddenError, UnauthenticatedError

ALICE, OPS, TOKEN = b"key of alice", b"key of ops", b"join token"


def ring(name: str, key: bytes) -> KeyRing:
    return KeyRing([Key(name, hashlib.sha256(key).digest())])


GUARDED = Gate(Rings(ring("alice", ALICE), ring("ops", OPS)), TOKEN)
NO_ADMIN_KEYS = Gate(Rings(ring("alice", ALICE), KeyRing()), TOKEN)
OPEN = Gate(Rings(KeyRing(), KeyRing()), b"")


def scope(shown: bytes | None = None, method: str = "GET", client: str = "127.0.0.1", **headers: str) -> Scope:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    if shown is not None:
        pairs.append((b"authorization", b"Bearer " + shown))
    return {"type": "http", "method": method, "client": (client, 1), "headers": pairs}


@pytest.mark.parametrize(
    ("path", "need"),
    [
        ("/healthz", Need.NOTHING),
        ("/v2/health/ready", Need.NOTHING),
        ("/v2/models/m/versions/1/ready", Need.NOTHING),
        ("/healthz/", Need.INFERENCE),
        ("/HEALTHZ", Need.INFERENCE),
        ("//healthz", Need.INFERENCE),
        ("/healthz/../status", Need.INFERENCE),
        ("/v2/models/a/b/ready", Need.INFERENCE),
        ("/v2/models/m/ready\n", Need.INFERENCE),
        ("/status", Need.ANY_KEY),
        ("/v2/repository/index", Need.ANY_KEY),
        ("/v2/repository/models/m/unload", Need.ADMIN),
        ("/v2/repository/models/m/load", Need.ADMIN),
        ("/admin/anything", Need.ADMIN),
        ("/predict", Need.INFERENCE),
        ("", Need.INFERENCE),
    ],
)
def test_paths_need_what_they_need_and_unknown_ones_a_key(path: str, need: Need) -> None:
    assert need_on_http_port(path) is need


def test_operators_port_is_open_for_scrapes_alone() -> None:
    assert need_on_operators_port("/metrics") is Need.NOTHING
    assert {need_on_operators_port(path) for path in ("/admin/x", "/", "/metrics/", "/status")} == {Need.ADMIN}


@pytest.mark.parametrize(
    ("gate", "need", "shown", "outcome"),
    [
        (GUARDED, Need.NOTHING, None, ""),
        (GUARDED, Need.INFERENCE, ALICE, "alice"),
        (GUARDED, Need.INFERENCE, OPS, ForbiddenError),
        (GUARDED, Need.INFERENCE, TOKEN, UnauthenticatedError),
        (GUARDED, Need.INFERENCE, None, UnauthenticatedError),
        (GUARDED, Need.ANY_KEY, OPS, "ops"),
        (GUARDED, Need.ANY_KEY, b"", UnauthenticatedError),
        (GUARDED, Need.ADMIN, OPS, "ops"),
        (GUARDED, Need.ADMIN, ALICE, ForbiddenError),
        (GUARDED, Need.ADMIN, TOKEN, UnauthenticatedError),
        (GUARDED, Need.ADMIN, None, UnauthenticatedError),
        (NO_ADMIN_KEYS, Need.ADMIN, TOKEN, "join token"),
        (NO_ADMIN_KEYS, Need.ADMIN, ALICE, ForbiddenError),
        (NO_ADMIN_KEYS, Need.ADMIN, b"", UnauthenticatedError),
        (OPEN, Need.INFERENCE, None, ""),
        (OPEN, Need.INFERENCE, b"whatever", ""),
        (OPEN, Need.ADMIN, None, "this machine"),
    ],
)
def test_the_gate_lets_in_whom_it_should(gate: Gate, need: Need, shown: bytes | None, outcome: object) -> None:
    if isinstance(outcome, str):
        assert gate.check(need, scope(shown)) == outcome
        return
    assert isinstance(outcome, type)
    with pytest.raises(outcome):
        gate.check(need, scope(shown))


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
def test_without_keys_and_token_admin_verbs_are_for_programs_of_this_machine(asked: Scope) -> None:
    with pytest.raises(ForbiddenError):
        OPEN.check(Need.ADMIN, asked)


def basic(password: bytes) -> str:
    return "Basic " + base64.b64encode(b"anybody:" + password).decode()


def test_a_password_is_a_key_but_never_for_admin_verbs_nor_for_other_sites() -> None:
    assert GUARDED.check(Need.ANY_KEY, scope(authorization=basic(ALICE))) == "alice"
    same = scope(method="POST", authorization=basic(ALICE), sec_fetch_site="same-origin")
    assert GUARDED.check(Need.INFERENCE, same) == "alice"
    for asked in (
        scope(method="POST", authorization=basic(ALICE)),
        scope(method="POST", authorization=basic(ALICE), sec_fetch_site="cross-site"),
        scope(authorization="Basic !!!"),
        scope(authorization="Basic"),
    ):
        with pytest.raises(UnauthenticatedError):
            GUARDED.check(Need.INFERENCE, asked)
    with pytest.raises(UnauthenticatedError):
        GUARDED.check(Need.ADMIN, scope(authorization=basic(OPS)))


def test_keys_can_be_exchanged() -> None:
    gate = Gate(Rings(ring("alice", ALICE), KeyRing()), b"")
    gate.rings = Rings(ring("bob", b"key of bob"), KeyRing())
    assert gate.check(Need.INFERENCE, scope(b"key of bob")) == "bob"
    with pytest.raises(UnauthenticatedError):
        gate.check(Need.INFERENCE, scope(ALICE))
