"""Credentials of a client for a service that requires an API key or TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiworld_serving.common.config.errors import UserError


@dataclass(frozen=True)
class ClientCredentials:
    """API key and TLS files of a client.

    Attributes:
        key: API key sent with each request; empty sends none.
        ca_file: trusted certificate authorities (PEM); None uses the system's.
        client_cert_file: certificate and private key (PEM) of the client, for mutual TLS.
    """

    key: str = ""
    ca_file: Path | None = None
    client_cert_file: Path | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def verify(self) -> ssl.SSLContext | bool:
        """httpx's `verify` argument. Raises UserError if a file cannot be used."""
        if self.ca_file is None and self.client_cert_file is None:
            return True
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise UserError(f"--ca-file {self.ca_file}: must contain CA certificates (PEM): {error}") from error
        if self.client_cert_file is not None:
            try:
                context.load_cert_chain(self.client_cert_file)
            except OSError as error:
                raise UserError(
                    f"--client-cert-file {self.client_cert_file}: must contain a certificate and its private key (PEM): {error}"
                ) from error
        return context

    @property
    def options(self) -> dict[str, Any]:
        """`headers` and `verify` as keyword arguments of httpx's clients and functions."""
        return {"headers": self.headers, "verify": self.verify}


NO_CREDENTIALS = ClientCredentials()
"""For a service without API keys and with a certificate that the system trusts."""
