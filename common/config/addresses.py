"""Parses HOST:PORT, and the default name of a process."""

import contextlib
import os
import socket
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

MAX_NAME_CHARS = 64
"""Equal to `multiworld.texts.MAX_NAME_CHARS`, which is not imported here because that would import torch for every command."""
NAME_PATTERN = rf"^[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}$"
NAME_ALLOWED = f"1 to {MAX_NAME_CHARS} letters, digits, dots, dashes or underscores, beginning with a letter or digit"


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


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Split "host:port,host:port". Raises ValueError for an invalid or repeated address."""
    addresses = tuple(parse_address(part.strip()) for part in text.split(","))
    if len(set(addresses)) < len(addresses):
        raise ValueError("must name each address once")
    return addresses


def local_host(peers: Iterable[Address]) -> str:
    """The local address of connections to the first of `peers` that has a route; otherwise that of this machine's name, or 127.0.0.1."""
    for peer in peers:
        with contextlib.suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as sock:
                sock.connect(address)  # of a UDP socket: chooses the route and sends nothing
                return str(sock.getsockname()[0])
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def default_name() -> str:
    """HOSTNAME-PID; see `name_after_host`."""
    return name_after_host(os.getpid())


def name_after_host(number: int) -> str:
    """HOSTNAME-NUMBER, the host name truncated to fit the limit."""
    return socket.gethostname()[: MAX_NAME_CHARS - len(f"-{number}")] + f"-{number}"
