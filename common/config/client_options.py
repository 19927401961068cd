"""Arguments of an HTTP client for a service that requires an API key or TLS."""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multiworld_serving.common.config.errors import UserError


def client_options(key: str = "", ca_file: Path | None = None, client_cert_file: Path | None = None) -> dict[str, Any]:
    """Keyword arguments of httpx's clients and functions.

    Args:
        key: API key sent with each request; empty sends none.
        ca_file: trusted certificate authorities (PEM); None uses the system's.
        client_cert_file: certificate and private key (PEM) of the client, for mutual TLS.
    Raises:
        UserError: a file cannot be used.
    """
    found: dict[str, Any] = {"headers": {"Authorization": f"Bearer {key}"} if key else {}}
    if ca_file is None and client_cert_file is None:
        return found
    what = f"--ca-file {ca_file}: must contain CA certificates"
    try:
        found["verify"] = ssl.create_default_context(cafile=ca_file)
        what = f"--client-cert-file {client_cert_file}: must contain a certificate and its private key"
        if client_cert_file is not None:
            found["verify"].load_cert_chain(client_cert_file)
    except OSError as error:
        raise UserError(f"{what} (PEM): {error}") from error
    return found


NO_CREDENTIALS: Mapping[str, Any] = {}
"""For a service without API keys and with a certificate that the system trusts."""
