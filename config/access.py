"""How a client gets into a service that asks for a key, or speaks TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.errors import UserError


@dataclass(frozen=True)
class Access:
    """What a client shows, and whom it believes.

    Attributes:
        key: shown with each request; empty shows none.
        ca_file: authorities (PEM) that may have signed the service's certificate; None takes the system's.
        client_cert_file: certificate and private key (PEM) of the client, for a service that asks for one.
    """

    key: str = ""
    ca_file: Path | None = None
    client_cert_file: Path | None = None

    @property
    def headers(self) -> dict[str, str]:
        """To go with every request."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def verify(self) -> ssl.SSLContext | bool:
        """What httpx calls `verify`. Raises UserError when a file cannot be used."""
        if self.ca_file is None and self.client_cert_file is None:
            return True
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise UserError(f"--ca-file {self.ca_file}: holds no certificates of authorities (PEM): {error}") from error
        if self.client_cert_file is not None:
            try:
                context.load_cert_chain(self.client_cert_file)
            except OSError as error:
                raise UserError(
                    f"--client-cert-file {self.client_cert_file}: must hold a certificate and its private key (PEM): {error}"
                ) from error
        return context

    @property
    def options(self) -> dict[str, Any]:
        """Both of these, as arguments of httpx's clients and functions."""
        return {"headers": self.headers, "verify": self.verify}


NOTHING = Access()
"""Of a service that asks for nothing, or whose certificate the system knows."""
