"""What the HTTP ports show and ask for when they speak TLS."""

from __future__ import annotations

import ssl
from pathlib import Path

from config import UserError
from server.settings import ServeSettings


def server_context(settings: ServeSettings, client_ca: Path | None) -> ssl.SSLContext | None:
    """A context from the files as they are now; None when there is no certificate.

    Args:
        client_ca: authorities of which one must have signed each client's certificate; None asks for none.
    Raises:
        UserError: a file cannot be read, or does not hold what it should; names it.
    """
    if settings.tls_cert_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # which lets a client make the server compute again and again
    context.set_alpn_protocols(["http/1.1"])
    _load_chain(context, settings.tls_cert_file, settings.tls_key_file)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(client_ca)
        except (OSError, ssl.SSLError) as error:
            raise UserError(f"{client_ca} holds no certificates of authorities (PEM): {_why(error)}") from error
    return context


def _load_chain(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    def no_password() -> str:
        raise UserError(
            f"the private key in {key or cert} has a password; give one without, that only the service can read"
        )

    try:
        context.load_cert_chain(cert, key, no_password)
    except (OSError, ssl.SSLError) as error:
        names = f"{cert}" + ("" if key is None else f" and {key}")
        raise UserError(f"{names}: no certificate (PEM) with its private key: {_why(error)}") from error


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not PEM").lower().replace("_", " ")
    return error.strerror or str(error)
