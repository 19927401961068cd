"""What START tells each member about the others: the generation, and where each accepts data connections."""

import ipaddress
import json
from dataclasses import dataclass

from multiworld.control.frames import FrameError


@dataclass(frozen=True, slots=True)
class Address:
    """Where a member accepts data connections: an IP address and a port, and the path of its Unix socket. "" and 0 if it has none."""

    host: str
    port: int
    local: str


@dataclass(frozen=True, slots=True)
class Roster:
    """The members of one forming of a world.

    Attributes:
        formation: a random name that rank 0 gave this forming; see `Hello`.
        addresses: by rank.
    """

    generation: int
    formation: str
    addresses: tuple[Address, ...]

    def encode(self) -> bytes:
        return json.dumps([self.formation, [[each.host, each.port, each.local] for each in self.addresses]]).encode()

    @staticmethod
    def decode(generation: int, data: bytes, size: int, host: tuple[str, int]) -> "Roster":
        """Decode the roster of a world of `size`. `host` is where we have reached rank 0. Raises FrameError."""
        try:
            formation, addresses = json.loads(data)
            decoded = [_decode(*fields) for fields in addresses]
        except (ValueError, TypeError, RecursionError) as error:
            raise FrameError(f"not a roster: {data[:60]!r}") from error
        if len(decoded) != size or not isinstance(formation, str):
            raise FrameError(f"not a roster of {size} members: {data[:60]!r}")
        decoded[0] = Address(*host, decoded[0].local)
        return Roster(generation, formation, tuple(decoded))


def _decode(host: str, port: int, local: str) -> Address:
    """Raises ValueError. A host must be an IP address, so that no name has to be resolved."""
    if host:
        ipaddress.ip_address(host)
    if not isinstance(host, str) or not isinstance(local, str) or type(port) is not int or not 0 <= port < 65536:
        raise ValueError(f"not an address: {host!r}, {port!r}, {local!r}")
    return Address(host, port, local)
