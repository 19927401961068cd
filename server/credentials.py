"""Keys, tokens and certificates: read from their files at the start, and anew on SIGHUP without a connection being lost."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import SecretStr

from config import SettingsError, UserError
from config.keys import KeyRing, keys_of_text, read_keys
from config.sources import variable
from server.access import Gate, Rings
from server.http_server import HttpServer
from server.join_tokens import JoinTokens
from server.settings import ServeSettings
from server.tls import server_context

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Credentials:
    """What the files said when they were read.

    Attributes:
        contexts: for TLS, by the setting of the port; None where a port speaks plain HTTP.
    """

    rings: Rings
    contexts: Mapping[str, ssl.SSLContext | None]


def read_credentials(settings: ServeSettings) -> Credentials:
    """Read all files. Raises UserError, which names the one that cannot be used."""
    inference = _ring("api_keys", settings.api_keys, settings.api_keys_file)
    admin = _ring("admin_keys", settings.admin_keys, settings.admin_keys_file)
    if shared := {key.digest for key in inference} & {key.digest for key in admin}:
        names = ", ".join(sorted(key.name for key in inference if key.digest in shared))
        raise SettingsError(f"the same key is for inference ({names}) and for administrators: give each its own")
    return Credentials(
        Rings(inference, admin),
        {
            "http_port": server_context(settings, settings.tls_client_ca_file),
            "metrics_port": server_context(settings, settings.metrics_client_ca_file),
        },
    )


def _ring(name: str, text: SecretStr | None, file: Path | None) -> KeyRing:
    if file is not None:
        return read_keys(file)
    return KeyRing() if text is None else keys_of_text(text.get_secret_value(), variable(name))


def warn_of_openness(settings: ServeSettings, credentials: Credentials) -> None:
    """Say so where other machines reach what nothing protects."""
    if _is_loopback(settings.host):
        return
    if not credentials.rings.inference:
        logger.warning("everybody who reaches %s may ask for inference: --api-keys-file closes it", settings.host)
    elif settings.tls_cert_file is None:
        logger.warning("keys travel in clear to %s: --tls-cert-file encrypts, or a proxy in front of it", settings.host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Renewable(Protocol):
    """What has keys and certificates of its own."""

    async def renew(self) -> None:
        """Read them anew, and use them. Raises UserError when they cannot be used: nothing has changed then."""


class Renewal:
    """Reads keys, tokens and certificates anew. What cannot be used changes nothing, and is told in the log.

    Args:
        servers: of this process, by the setting of their port.
        frontends: which are to do the same, where there are any.
    """

    def __init__(
        self,
        settings: ServeSettings,
        gate: Gate,
        tokens: JoinTokens,
        servers: Mapping[str, HttpServer],
        frontends: Renewable | None = None,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._tokens = tokens
        self._servers = servers
        self._frontends = frontends
        self._task: asyncio.Task[None] | None = None

    def on_hangup(self) -> None:
        """Renew on SIGHUP from now on, where there are files to be read; else the signal ends the process, as it always does."""
        settings = self._settings
        if settings.tls_cert_file or settings.api_keys_file or settings.admin_keys_file or settings.token_file:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._begin)

    def _begin(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self.renew())

    async def renew(self) -> None:
        """Read all, then use all."""
        try:
            credentials = read_credentials(self._settings)
            if self._frontends is not None:
                await self._frontends.renew()
            tokens = self._tokens.reload()
        except UserError as error:
            logger.error("keys, tokens and certificates stay as they were: %s", error)  # noqa: TRY400 - a person's to mend
            return
        for port, context in credentials.contexts.items():
            if context is not None and port in self._servers:
                await self._servers[port].exchange(context)
        self._gate.rings = credentials.rings
        self._gate.tokens = self._tokens.operators()
        rings = credentials.rings
        logger.info(
            "keys, tokens and certificates were read anew keys=%d admin_keys=%d tokens=%d",
            len(list(rings.inference)),
            len(list(rings.admin)),
            tokens,
        )
