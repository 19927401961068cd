"""Connects the members of a forming world to each other: each connects to all lower ranks, in parallel, and accepts all higher ranks.

Members on one host connect through the Unix socket of the process (local_socket.py), the others by TCP.
Rank 0 accepts on the port of its control connections. Every other member except the last opens a port for this before it joins, and
closes it when all are connected. Rank 0 sends the addresses of all members with `Start`. The handshake is the same as on a control
connection and covers the world, the generation and both ranks.
"""

import asyncio
import logging
import socket

from msgspec.structs import replace

from multiworld.config import WorldConfig
from multiworld.control.dial import RefusedError, dial, reason_of
from multiworld.control.frames import Address, Start
from multiworld.control.handshake import Hello
from multiworld.control.loop import ControlLoop
from multiworld.errors import JoinError
from multiworld.execution.process_group import NCCL
from multiworld.membership.acceptor import Acceptor, RejectedError, bind

logger = logging.getLogger(__name__)

_ATTEMPT_S = 5.0
_PAUSE_S = 0.1


class Mesh:
    """Connects one member to all others. Runs on the control loop's thread.

    Attributes:
        obstacle: why the last attempt to connect failed; "" if none did.

    Args:
        member: our own world, rank and size.
        acceptor: the port of rank 0; None at the other ranks.
    """

    def __init__(
        self, control_loop: ControlLoop, member: Hello, config: WorldConfig, acceptor: Acceptor | None
    ) -> None:
        self.key: tuple[str, int | None] = member.world, 0
        self._needed = {*config.backends.values()} != {NCCL}
        self.obstacle = ""
        self._control_loop = control_loop
        self._member = member
        self._config = config
        self._acceptors = [each for each in (acceptor, config.local_acceptor) if each is not None]
        self._port: Acceptor | None = None
        self._connected: asyncio.Future[None] = control_loop.loop.create_future()
        self._socks: dict[int, socket.socket] = {}
        self._dials: list[asyncio.Task[None]] = []

    def address(self, local_host: str) -> Address:
        """Where this member accepts data connections. Opens a port on `local_host` if necessary. Raises OSError."""
        member, local = self._member, self._config.local_acceptor
        if not self._needed or member.rank == member.size - 1:
            return Address()
        if self._port is None and member.rank:
            self._port = Acceptor(self._control_loop, bind(local_host, 0), [self._config.secret])
            self._port.open()
            self._acceptors.append(self._port)
        host, port = self._port.address[:2] if self._port is not None else ("", 0)
        return Address(host, port, "" if local is None else local.address)

    async def connect(self, start: Start) -> dict[int, socket.socket]:
        """Connect to all lower ranks and accept all higher ranks, including those that connected before.

        Returns the sockets by rank, which the caller owns: none in a world of one, and with NCCL only. Raises JoinError when a member
        refuses us. The caller must `close` the mesh.
        """
        if not self._needed or self._member.size == 1:
            return {}
        self.key = self._member.world, start.generation
        self._member = replace(self._member, generation=start.generation, formation=start.formation)
        for acceptor in self._acceptors:
            acceptor.add(self)
        lower = start.addresses[: self._member.rank]
        self._dials = [self._control_loop.create_task(self._dial(*each)) for each in enumerate(lower)]
        await self._connected
        socks, self._socks = self._socks, {}
        return socks

    def close(self) -> None:
        """Stop connecting and accepting, and close the connections that were not handed over."""
        for task in self._dials:
            task.cancel()
        for acceptor in self._acceptors:
            acceptor.remove(self)
        if self._port is not None:
            self._port.close()
        for sock in self._socks.values():
            sock.close()
        # The traceback of an error can keep earlier worlds alive.
        self._connected = self._control_loop.loop.create_future()

    # -- accepting (see `AdmissionTarget`) -----------------------------------------------------------------------------------

    def accepts(self, hello: Hello) -> bool:
        ours = self._member
        if hello.size != ours.size or not ours.rank < hello.rank < hello.size:
            raise RejectedError(
                f"rank {hello.rank} of {hello.size} must not connect to rank {ours.rank} of {ours.size}"
            )
        if hello.peer != ours.rank:
            raise RejectedError(f"this is rank {ours.rank}, not {hello.peer}")
        if not ours.formation or hello.formation != ours.formation:
            raise RejectedError("this member does not form that world any more")
        return True

    def admit(self, hello: Hello, sock: socket.socket) -> None:
        """Keep the connection to a rank. A second connection replaces the first, which the same peer has abandoned (see `accepts`)."""
        self._add(hello.rank, sock)

    def _add(self, rank: int, sock: socket.socket) -> None:
        if rank in self._socks:
            self._socks[rank].close()
        self._socks[rank] = sock
        if len(self._socks) == self._member.size - 1 and not self._connected.done():
            self._connected.set_result(None)

    # -- connecting ----------------------------------------------------------------------------------------------------------

    async def _dial(self, rank: int, address: Address) -> None:
        """Connect to a lower rank. Repeats after a failure."""
        hello, config = replace(self._member, peer=rank), self._config
        local = address.local if config.local_acceptor is not None else ""
        while True:
            to = local or (address.host, address.port)
            try:
                sock = await dial(to, config.secret, lambda _: hello, _ATTEMPT_S, config.bind_host)
            except (OSError, ValueError, RefusedError) as error:
                if local:  # it is not on this host, or in a container that does not share the socket
                    logger.debug("world=%s: rank %d is not reached by its Unix socket: %s", hello.world, rank, error)
                    local = ""
                    continue
                self.obstacle = f"rank {rank} at {address.host}:{address.port}: {reason_of(error)}"
                if isinstance(error, RefusedError):
                    if not self._connected.done():
                        self._connected.set_exception(JoinError(hello.world, self.obstacle))
                    return
                await asyncio.sleep(_PAUSE_S)
            else:
                self._add(rank, sock)
                return
