"""TLS contexts of the HTTP ports."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.settings.serve import HttpSettings


@dataclass(frozen=True)
class TlsFiles:
    """The same for gRPC, which takes PEM and no context.

    Attributes:
        client_ca: CA certificates; each client must present a certificate signed by one of them. None = no client certificates.
    """

    chain: bytes
    key: bytes
    client_ca: bytes | None


def read_tls_files(settings: HttpSettings) -> TlsFiles | None:
    """The files of the HTTP API, which `server_context` has checked; None if no certificate is configured. Raises OSError."""
    if settings.tls_cert_file is None:
        return None
    client_ca = settings.tls_client_ca_file
    return TlsFiles(
        settings.tls_cert_file.read_bytes(),
        (settings.tls_key_file or settings.tls_cert_file).read_bytes(),
        None if client_ca is None else client_ca.read_bytes(),
    )


def server_context(settings: HttpSettings, client_ca: Path | None) -> ssl.SSLContext | None:
    """Create a TLS context from the files; None if no certificate is configured.

    Args:
        client_ca: CA certificates; each client must present a certificate signed by one of them. None = no client certificates.
    Raises:
        UserError: a file cannot be read or has invalid content; the message names it.
    """
    if settings.tls_cert_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # clients could use renegotiation to waste the server's CPU time
    context.set_alpn_protocols(["http/1.1"])
    _load_chain(context, settings.tls_cert_file, settings.tls_key_file)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # a resumed session would not be checked against authorities that were reloaded
        try:
            context.load_verify_locations(client_ca)
        except (OSError, ssl.SSLError) as error:
            raise UserError(f"{client_ca} contains no CA certificates (PEM): {_describe(error)}") from error
    return context


def _load_chain(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    def no_password() -> str:
        raise UserError(
            f"the private key in {key or cert} has a password; use a key without one, readable by the service only"
        )

    try:
        context.load_cert_chain(cert, key, no_password)
    except (OSError, ssl.SSLError) as error:
        names = f"{cert}" + ("" if key is None else f" and {key}")
        raise UserError(f"{names}: no certificate (PEM) with its private key: {_describe(error)}") from error


def _describe(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").lower().replace("_", " ")
    return error.strerror or str(error)
