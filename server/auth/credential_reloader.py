"""Loads keys and certificates at start and reloads them on SIGHUP without closing connections."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from multiworld_serving.common.config import SettingsError, UserError
from multiworld_serving.common.config.keys import KeySet, read_keys
from multiworld_serving.common.http.server import HttpServer
from multiworld_serving.server.auth.authorizer import ApiKeys, Authorizer
from multiworld_serving.server.http.tls import TlsFiles, read_tls_files, server_context
from multiworld_serving.server.settings import HttpSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Credentials:
    """Keys and TLS contexts as loaded from the files.

    Attributes:
        contexts: TLS contexts by the setting of the port; None = plain HTTP.
        grpc: for the gRPC port; None = no TLS.
    """

    keys: ApiKeys
    contexts: Mapping[str, ssl.SSLContext | None]
    grpc: TlsFiles | None

    def apply(self, authorizer: Authorizer, servers: Mapping[str, HttpServer]) -> None:
        """Use these credentials from now on. Cannot fail: everything was validated when they were read."""
        authorizer.keys = self.keys
        for port, context in self.contexts.items():
            if context is not None and port in servers:
                servers[port].reload_tls(context)


def read_credentials(settings: HttpSettings) -> Credentials:
    """Read all files. Raises UserError, which names the invalid file."""
    inference, admin = (
        KeySet() if file is None else read_keys(file) for file in (settings.api_keys_file, settings.admin_keys_file)
    )
    if shared := {key.digest for key in inference} & {key.digest for key in admin}:
        names = ", ".join(sorted(key.name for key in inference if key.digest in shared))
        raise SettingsError(f"the same key is used for inference ({names}) and admin; create a separate key for each")
    return Credentials(
        ApiKeys(inference, admin),
        {
            "http_port": server_context(settings, settings.tls_client_ca_file),
            "metrics_port": server_context(settings, settings.metrics_client_ca_file),
        },
        read_tls_files(settings),
    )


def warn_if_unprotected(settings: HttpSettings, credentials: Credentials) -> None:
    """Log a warning if other machines can reach the service without authentication or encryption."""
    if _is_loopback(settings.host):
        return
    if not credentials.keys.inference:
        logger.warning("anyone who can reach %s can request inference; --api-keys-file requires keys", settings.host)
    elif settings.tls_cert_file is None:
        logger.warning("keys are sent unencrypted to %s; use --tls-cert-file or a TLS proxy", settings.host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class CredentialReloader:
    """Reloads keys and certificates. Either all are used or none; the log says which.

    Args:
        servers: the HTTP servers of this process, by the setting of their port.
        reload_grpc: called with the files for the gRPC port; None = there is none.
    """

    def __init__(
        self,
        settings: HttpSettings,
        authorizer: Authorizer,
        servers: Mapping[str, HttpServer],
        reload_grpc: Callable[[TlsFiles], None] | None = None,
    ) -> None:
        self._settings = settings
        self._authorizer = authorizer
        self._servers = servers
        self._reload_grpc = reload_grpc
        self._task: asyncio.Task[None] | None = None
        self._requested = False

    def reload_on_sighup(self) -> None:
        """Reload on SIGHUP if credentials come from files. Otherwise SIGHUP keeps its default action and ends the process."""
        settings = self._settings
        if settings.tls_cert_file or settings.api_keys_file or settings.admin_keys_file or settings.token_file:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.request_reload)

    def request_reload(self) -> None:
        """Start a reload. If one is running, another follows: it may have read the files already."""
        self._requested = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._reload_while_requested())

    async def _reload_while_requested(self) -> None:
        while self._requested:
            self._requested = False
            await self.reload()

    async def reload(self) -> None:
        """Read and validate everything, then apply everything."""
        try:
            credentials = read_credentials(self._settings)
        except Exception as error:
            unexpected = not isinstance(error, UserError | OSError)
            logger.error("keys and certificates are unchanged: %s", error, exc_info=unexpected)  # noqa: TRY400
            return
        credentials.apply(self._authorizer, self._servers)
        if self._reload_grpc is not None and credentials.grpc is not None:
            self._reload_grpc(credentials.grpc)
        keys = credentials.keys
        counts = len(list(keys.inference)), len(list(keys.admin))
        logger.info("reloaded keys and certificates keys=%d admin_keys=%d", *counts)
