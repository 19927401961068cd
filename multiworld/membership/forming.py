"""Forms a world: its members join at rank 0 and connect to each other, on the control loop. A world with NCCL then connects that.

For its data connections each member connects to all lower ranks, in parallel, and accepts all higher ranks. Members on one host connect
through the Unix socket of the process (listeners.py), the others by TCP. Rank 0 accepts on the port of its control connections. Every
other member except the last opens a port for this before it joins, and closes it when all are connected. Rank 0 sends the addresses of
all members with `Start`. The handshake is the same as on a control connection and covers the world, the generation and both ranks.
"""

import asyncio
import itertools
import logging
import os
import socket
from typing import Protocol

from msgspec.structs import replace

from multiworld.collectives.nccl import NCCL, NcclCollectives
from multiworld.config import WorldConfig
from multiworld.control.dial import dial, reason_of, resolve
from multiworld.control.frames import Address, Start
from multiworld.control.handshake import Hello, RefusedError
from multiworld.control.loop import ControlLoop
from multiworld.errors import Cause, JoinError, WorldError
from multiworld.execution.failures import ConnectionLostError, described
from multiworld.membership.acceptor import Acceptor, RejectedError, listen_on
from multiworld.membership.monitor import MembershipMonitor, MonitoredWorld

logger = logging.getLogger(__name__)

_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Pauses between attempts to connect to rank 0, which may not have started yet. The last one repeats."""
_CONNECT_S = 1.0
"""Lower limit of the timeout of one attempt, which is the heartbeat timeout, at most `_MAX_CONNECT_S`."""
_MAX_CONNECT_S = 5.0
_DATA_CONNECT_S = 5.0
"""Timeout of one attempt to open a data connection."""
_DATA_PAUSE_S = 0.1
"""Pause between attempts to open a data connection."""


class FormingWorld(MonitoredWorld, Protocol):
    """The part of a world that `Forming` uses. All methods may be called from any thread.

    Attributes:
        nccl: connects when all members have joined; None without NCCL.
    """

    generation: int
    nccl: NcclCollectives | None

    def ending(self) -> WorldError | None:
        """Return a new instance of the error that the world ended with; None while it has not ended."""

    def on_formed(self, socks: dict[int, socket.socket]) -> None:
        """Make the world ready, with the data connections by rank.

        Raises OSError, and the world's error if it has ended. The caller closes the connections then.
        """


class Forming:
    """Forms a world at one member. Everything except `run` runs on the control loop's thread.

    Attributes:
        key: see `AdmissionTarget`; of the data connections.
        monitor: monitors the other members; None before the first step and after the end.

    Args:
        acceptor: the port of rank 0; None at the other ranks.
    """

    def __init__(
        self, world: FormingWorld, config: WorldConfig, control_loop: ControlLoop, acceptor: Acceptor | None
    ) -> None:
        self.key: tuple[str, int | None] = config.name, 0
        self.monitor: MembershipMonitor | None = None
        self._world = world
        self._config = config
        self._control_loop = control_loop
        self._acceptor = acceptor
        backend = "multiworld" if config.device is None else NCCL
        settings = f"backend={backend}, verify_collectives={config.verify_collectives}"
        formation = os.urandom(8).hex() if config.rank == 0 else ""
        self._member = Hello(
            config.name, config.rank, config.size, config.generation, formation=formation, settings=settings
        )
        self._obstacle = "no answer"  # why the last attempt to connect failed
        self._forming: asyncio.Task[None] | None = None
        self._data_acceptors = [each for each in (acceptor, config.local_acceptor) if each is not None]
        self._port: Acceptor | None = None  # one of them, opened for this world
        self._connected: asyncio.Future[None] = control_loop.loop.create_future()
        self._socks: dict[int, socket.socket] = {}
        self._dials: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """See `World.open`."""
        config, world = self._config, self._world
        try:
            # No local name for the timeout. It refers to its task; a cancelled task holds its error, whose traceback holds this frame; and
            # Python 3.11's garbage collector does not find this cycle.
            async with asyncio.timeout(config.timeout_s):
                addresses = await self._resolve() if config.rank else []
                self._check()
                forming = asyncio.run_coroutine_threadsafe(self._form(addresses), self._control_loop.loop)
                await asyncio.wrap_future(forming)
        except asyncio.CancelledError:
            world.fail(Cause.ABORTED, config.rank, "cancelled while joining")
            raise
        except TimeoutError:
            obstacle = self._describe_obstacle()
            world.fail(Cause.TIMEOUT, -1, "did not form in time")
            raise JoinError(
                config.name,
                f"did not form within {config.timeout_s:g} s as rank {config.rank} of {config.size} at "
                f"{config.addr}:{config.port}: {obstacle}",
            ) from None
        except WorldError as error:
            raise error.with_traceback(None) from None
        except Exception as error:
            lost = isinstance(error, ConnectionLostError)
            world.fail(Cause.TRANSPORT if lost else Cause.LOCAL, -1 if lost else config.rank, described(error))
            raise JoinError(config.name, f"the world could not be formed: {error}") from error

    def _describe_obstacle(self) -> str:
        monitor = self.monitor
        if monitor is not None and monitor.started:
            return f"all members joined, but their connections did not form: {self._obstacle}"
        if monitor is not None and self._config.rank == 0:
            return f"ranks {', '.join(map(str, monitor.missing()))} did not join"
        return self._obstacle

    async def _form(self, addresses: list[tuple[str, int]]) -> None:
        """Join at the addresses of rank 0, or admit the others there. Then connect to all members."""
        world, socks = self._world, dict[int, socket.socket]()
        self._forming = task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # no warning if `run` was cancelled
        try:
            self._check()  # it may have ended since `run`
            start = await self._join(addresses)
            world.generation = start.generation
            socks = await self._connect(start)
            if self._world.nccl is not None:
                await asyncio.wrap_future(self._world.nccl.connect())
            world.on_formed(socks)
        except BaseException:
            for sock in socks.values():
                sock.close()
            self._check()  # the error of the world is the cause of others
            raise
        finally:
            self._stop_connecting()
            self._forming = None

    def cancel(self) -> None:
        """The world has ended: end `run` with its error."""
        if self._forming is not None:
            self._forming.cancel()

    # -- joining -----------------------------------------------------------------------------------------------------------------

    async def _resolve(self) -> list[tuple[str, int]]:
        """Return the addresses of rank 0. Retries while the name cannot be resolved, for example because its container has not started."""
        config = self._config
        while True:
            try:
                return [(host, config.port) for host in await resolve(config.addr)]
            except OSError as error:
                self._obstacle = f"{config.addr} cannot be resolved: {error.strerror}"
                await asyncio.sleep(_RETRY_S[-1])

    async def _join(self, addresses: list[tuple[str, int]]) -> Start:
        """At rank 0: wait until all others have joined. At the others: join at rank 0, and retry after each failure until it starts.

        Raises JoinError when rank 0 refuses us, OSError when no port can be opened for the other members.
        """
        config, member = self._config, self._member
        if self._acceptor is not None:
            member = replace(member, address=self._address(""))
        store = None if self._world.nccl is None else self._world.nccl.store
        self.monitor = monitor = MembershipMonitor(self._control_loop, self._world, member, config.heartbeat, store)
        if self._acceptor is not None:
            self._acceptor.add(monitor)
            return await monitor.host()
        awaited = f"generation {member.generation}" if member.generation else "the world"

        def make_hello(local_host: str) -> Hello:
            self._obstacle = f"rank 0 answered, but {awaited} did not start there"
            return replace(member, address=self._address(local_host))

        timeout_s = min(max(config.heartbeat.timeout_s, _CONNECT_S), _MAX_CONNECT_S)
        for attempt, (host, port) in enumerate(itertools.cycle(addresses)):
            try:
                sock = await dial((host, port), config.secret, make_hello, timeout_s, config.bind_host)
                start = await monitor.join(sock)
            except RefusedError as error:
                reason = f"rank 0 at {config.addr}:{config.port} refused us: {error}"
                raise JoinError(config.name, reason) from None
            except (OSError, ValueError) as error:
                self._obstacle = reason_of(error)
                await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
            else:
                rank_0 = replace(start.addresses[0], host=host, port=port)  # where we have reached it
                return replace(start, addresses=(rank_0, *start.addresses[1:]))
        raise AssertionError("no address of rank 0")

    def publish(self, key: str, value: bytes) -> None:
        """Send a key of NCCL's rendezvous to the other members."""
        if self.monitor is not None:
            self.monitor.publish(key, value)

    # -- data connections ----------------------------------------------------------------------------------------------------------

    def _address(self, local_host: str) -> Address:
        """Return where this member accepts data connections. Opens a port on `local_host` if necessary. Raises OSError."""
        rank, local = self._config.rank, self._config.local_acceptor
        if rank == self._config.size - 1:
            return Address()
        if self._port is None and rank:
            self._port = Acceptor(self._control_loop, listen_on((local_host, 0)), [self._config.secret])
            self._port.open()
            self._data_acceptors.append(self._port)
        host, port = self._port.address[:2] if self._port is not None else ("", 0)
        return Address(host, port, "" if local is None else local.address)

    async def _connect(self, start: Start) -> dict[int, socket.socket]:
        """Connect to all lower ranks, and accept connections of all higher ranks. Some of these may have connected already.

        Returns the sockets by rank, which the caller owns: none in a world of one. Raises JoinError when a member refuses us. The caller
        must `_stop_connecting`.
        """
        if self._config.size == 1:
            return {}
        self._obstacle = "no answer"
        self.key = self._config.name, start.generation
        self._member = replace(self._member, generation=start.generation, formation=start.formation)
        for acceptor in self._data_acceptors:
            acceptor.add(self)
        lower = start.addresses[: self._config.rank]
        self._dials = [self._control_loop.loop.create_task(self._dial(*each)) for each in enumerate(lower)]
        await self._connected
        socks, self._socks = self._socks, {}
        return socks

    def _stop_connecting(self) -> None:
        """Stop connecting and accepting, and close the connections that were not handed over."""
        for task in self._dials:
            task.cancel()
        for acceptor in self._data_acceptors:
            acceptor.remove(self)
        if self._port is not None:
            self._port.close()
        for sock in self._socks.values():
            sock.close()
        # The traceback of an error can keep earlier worlds alive.
        self._connected = self._control_loop.loop.create_future()

    def accepts(self, hello: Hello) -> bool:
        """See `AdmissionTarget`."""
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

    async def _dial(self, rank: int, address: Address) -> None:
        """Connect to a lower rank. Repeats after a failure."""
        hello, config = replace(self._member, peer=rank), self._config
        local = address.local if config.local_acceptor is not None else ""
        while True:
            to = local or (address.host, address.port)
            try:
                sock = await dial(to, config.secret, lambda _: hello, _DATA_CONNECT_S, config.bind_host)
            except (OSError, ValueError, RefusedError) as error:
                if local:  # it is not on this host, or in a container that does not share the socket
                    logger.debug("world=%s: rank %d is not reached by its Unix socket: %s", hello.world, rank, error)
                    local = ""
                    continue
                self._obstacle = f"rank {rank} at {address.host}:{address.port}: {reason_of(error)}"
                if isinstance(error, RefusedError):
                    if not self._connected.done():
                        self._connected.set_exception(JoinError(hello.world, self._obstacle))
                    return
                await asyncio.sleep(_DATA_PAUSE_S)
            else:
                self._add(rank, sock)
                return

    def _check(self) -> None:
        """Raises the world's error if it has ended."""
        if error := self._world.ending():
            raise error

    def finish(self) -> None:
        """Close all connections that the world does not own. It may run before `_form` has noticed its cancellation."""
        if self.monitor is not None:
            self.monitor.close()
        self._stop_connecting()
        self.monitor = None  # the traceback of an error in it can keep earlier worlds alive
