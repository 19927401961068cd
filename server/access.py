"""Who may do what: the middleware of both ports that lets a request through or refuses it with 401 or 403.

Keys are of two kinds, and no key is of both: those for inference and those of administrators. Without keys for inference
everybody may ask; without keys of administrators, admin verbs need the join token, and where that was made up by us, to be asked
from this machine by a program that is no browser.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from config.keys import KeyRing
from server.errors import ForbiddenError, RequestRefused, UnauthenticatedError
from server.http_errors import refusal_response
from server.request_record import RequestRecord

logger = logging.getLogger(__name__)


class Need(Enum):
    """What a path needs."""

    NOTHING = "nothing"
    ANY_KEY = "any key"
    INFERENCE = "a key for inference"
    ADMIN = "an administrator's key"


_OPEN = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
_OPEN_MODEL = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/ready")
_WATCHING = frozenset({"/", "/status", "/events", "/metrics", "/openapi.json", "/v2/repository/index"})


def need_on_http_port(path: str) -> Need:
    """What a path of the HTTP port needs. What is not known here needs a key for inference, whether it exists or not."""
    if path in _OPEN or _OPEN_MODEL.fullmatch(path):
        return Need.NOTHING
    if path in _WATCHING or path.startswith("/status-page/"):
        return Need.ANY_KEY
    if path.startswith(("/admin/", "/v2/repository/")):
        return Need.ADMIN
    return Need.INFERENCE


def need_on_operators_port(path: str) -> Need:
    """What a path of the operators' port needs: scrapes and probes nothing, all else an administrator's key."""
    return Need.NOTHING if path in {"/metrics", "/healthz", "/readyz"} else Need.ADMIN


@dataclass(frozen=True)
class Rings:
    """The keys that are known.

    Attributes:
        inference: empty when none is needed.
        admin: empty when the join token opens admin verbs.
    """

    inference: KeyRing
    admin: KeyRing


class Caller(NamedTuple):
    """Who shows a key that is known."""

    name: str
    is_admin: bool


class Gate:
    """Decides. Its keys may be exchanged while it is in use.

    Args:
        token: the join token; empty where nobody was told it.
    """

    def __init__(self, rings: Rings, token: bytes) -> None:
        self.rings = rings
        self._token = token

    def check(self, need: Need, scope: Scope) -> str:
        """Name of who is let in; empty when nobody asked.

        Raises:
            UnauthenticatedError: no key, or one that is not known.
            ForbiddenError: a key that may not do this.
        """
        if need is Need.NOTHING:
            return ""
        headers = Headers(scope=scope)
        if need is Need.ADMIN:
            return self._check_admin(scope, headers)
        if not self.rings.inference:
            return ""
        caller = self._caller(_shown(headers, scope["method"]))
        if caller is None:
            raise UnauthenticatedError(_HOW)
        if caller.is_admin and need is Need.INFERENCE:
            raise ForbiddenError("an administrator's key is not for inference; send one of --api-keys-file")
        return caller.name

    def _check_admin(self, scope: Scope, headers: Headers) -> str:
        shown = _bearer(headers)
        caller = self._caller(shown)
        if caller is not None and caller.is_admin:
            return caller.name
        if caller is not None:
            raise ForbiddenError("a key for inference is not for admin verbs; send one of --admin-keys-file")
        if self.rings.admin:
            raise UnauthenticatedError("send an administrator's key as `Authorization: Bearer KEY`")
        if self._token:
            if shown is None or not hmac.compare_digest(shown, self._token):
                raise UnauthenticatedError("send the join token as `Authorization: Bearer TOKEN`")
            return "join token"
        if not _is_this_machine(scope) or any(name in headers for name in _OF_BROWSERS_AND_PROXIES):
            raise ForbiddenError(
                "without keys of administrators (--admin-keys-file) or a join token of its own (--token-file), the service "
                "takes this from programs on its own machine only"
            )
        return "this machine"

    def _caller(self, shown: bytes | None) -> Caller | None:
        if shown is None:
            return None
        admin, inference = self.rings.admin.holder(shown), self.rings.inference.holder(shown)
        if admin is not None:
            return Caller(admin, is_admin=True)
        return None if inference is None else Caller(inference, is_admin=False)


_OF_BROWSERS_AND_PROXIES = ("origin", "sec-fetch-site", "via", "forwarded", "x-forwarded-for", "x-real-ip")
"""What a program on this machine does not send, while a page in its browser does, or a proxy on it for somebody elsewhere."""
_HOW = "this service needs a key: send it as `Authorization: Bearer KEY`"


def _bearer(headers: Headers) -> bytes | None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip().encode("latin-1") if scheme.lower() == "bearer" else None


def _shown(headers: Headers, method: str) -> bytes | None:
    """The key that a request shows; of a browser, the password, unless another site's page has made it send the request."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return _bearer(headers)
    if method not in {"GET", "HEAD"} and headers.get("sec-fetch-site") != "same-origin":
        return None
    try:
        return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return None


def _is_this_machine(scope: Scope) -> bool:
    try:
        return scope["client"] is not None and ipaddress.ip_address(scope["client"][0]).is_loopback
    except ValueError:
        return False


class AccessControl:
    """ASGI middleware; lies between what gives a request its record and the routes.

    Args:
        need: tells what a path needs.
    """

    def __init__(self, app: ASGIApp, *, gate: Gate, need: Callable[[str], Need]) -> None:
        self._app = app
        self._gate = gate
        self._need = need

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        need = self._need(scope["path"])
        try:
            name = self._gate.check(need, scope)
        except (UnauthenticatedError, ForbiddenError) as refusal:
            await _refuse(refusal, need, scope, receive, send)
            return
        if need is Need.ADMIN:
            logger.info("admin verb %s %s by=%s", scope["method"], scope["path"][:256], name.replace(" ", "_"))
        await self._app(scope, receive, send)


async def _refuse(refusal: RequestRefused, need: Need, scope: Scope, receive: Receive, send: Send) -> None:
    response = refusal_response(refusal, RequestRecord.of(scope))
    if response.status_code == 401:
        response.headers.append("WWW-Authenticate", 'Bearer realm="multiworld"')
        if need is Need.ANY_KEY:  # what a person may look at in a browser, which then asks for a password
            response.headers.append("WWW-Authenticate", 'Basic realm="multiworld: the key as the password"')
    await response(scope, receive, send)
