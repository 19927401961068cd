"""Parses HOST:PORT."""

from typing import NamedTuple
from urllib.parse import urlsplit


class Address(NamedTuple):
    """A host and a port. `host` has no IPv6 brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, default_port: int | None = None) -> Address:
    """Split "host:port" or "[::1]:port". Raises ValueError unless both are present and the port is 1 to 65535.

    Args:
        default_port: used if the text has no port.
    """
    parts = urlsplit(f"//{text}")
    port = parts.port if parts.port is not None or text.endswith(":") else default_port
    if not parts.hostname or not port or parts.netloc != text or "@" in text or text != "".join(text.split()):
        raise ValueError("must be HOST:PORT")
    return Address(parts.hostname, port)
