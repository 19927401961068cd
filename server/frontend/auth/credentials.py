"""Loads keys and certificates at start and reloads them on SIGHUP without closing connections."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable
from typing import NamedTuple

from multiworld_serving.common.config.errors import SettingsError, UserError
from multiworld_serving.common.config.keys import KeySet, read_keys
from multiworld_serving.common.http.tls import TlsFiles, read_tls_files, server_context
from multiworld_serving.common.settings.serve import HttpSettings
from multiworld_serving.server.frontend.auth.authorizer import ApiKeys, is_loopback

logger = logging.getLogger(__name__)


class Credentials(NamedTuple):
    """Keys and TLS contexts as loaded from the files. Without a certificate, the ports use plain HTTP."""

    keys: ApiKeys
    http: ssl.SSLContext | None
    admin: ssl.SSLContext | None
    grpc: TlsFiles | None


def read_credentials(settings: HttpSettings) -> Credentials:
    """Read all files. Raises UserError, which names the invalid file."""
    inference, admin = (
        KeySet() if file is None else read_keys(file) for file in (settings.api_keys_file, settings.admin_keys_file)
    )
    if shared := inference.keys() & admin.keys():
        names = ", ".join(sorted(inference[digest] for digest in shared))
        raise SettingsError(f"the same key is used for inference ({names}) and admin; create a separate key for each")
    if limited := ", ".join(sorted(admin.models)):
        raise SettingsError(f"the admin key {limited} is limited to models; only inference keys can be")
    return Credentials(
        ApiKeys(inference, admin),
        server_context(settings, settings.tls_client_ca_file),
        server_context(settings, settings.admin_client_ca_file),
        read_tls_files(settings),
    )


def warn_if_unprotected(settings: HttpSettings, credentials: Credentials) -> None:
    """Log a warning if other machines can reach the service without authentication or encryption."""
    if is_loopback(settings.host):
        return
    if not credentials.keys.inference:
        logger.warning("anyone who can reach %s can request inference; --api-keys-file requires keys", settings.host)
    elif settings.tls_cert_file is None:
        logger.warning("keys are sent unencrypted to %s; use --tls-cert-file or a TLS proxy", settings.host)


def reload_on_sighup(settings: HttpSettings, apply: Callable[[Credentials], None]) -> None:
    """Reload on SIGHUP if credentials come from files. Otherwise SIGHUP keeps its default action and ends the process."""
    if settings.tls_cert_file or settings.api_keys_file or settings.admin_keys_file or settings.token_file:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload_credentials, settings, apply)


def reload_credentials(settings: HttpSettings, apply: Callable[[Credentials], None]) -> None:
    """Read all files and apply them. If one is invalid, none is applied. The log says which."""
    try:
        credentials = read_credentials(settings)
    except Exception as error:
        unexpected = not isinstance(error, UserError | OSError)
        logger.error("keys and certificates are unchanged: %s", error, exc_info=unexpected)  # noqa: TRY400
        return
    apply(credentials)
    counts = (len(list(keys)) for keys in (credentials.keys.inference, credentials.keys.admin))
    logger.info("reloaded keys and certificates keys=%d admin_keys=%d", *counts)
