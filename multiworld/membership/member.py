"""The monitor of every rank except 0: connects to rank 0, joins there, and monitors rank 0. See monitor.py."""

import asyncio
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from multiworld.control.connection import ControlConnection
from multiworld.control.dial import RefusedError, dial, reason_of
from multiworld.control.frames import Frame, FrameError, Heartbeat, Refuse, Start
from multiworld.control.handshake import Hello
from multiworld.control.loop import ControlLoop
from multiworld.errors import Cause
from multiworld.membership.monitor import HeartbeatConfig, MembershipMonitor, MonitoredWorld
from multiworld.texts import shown

_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Pauses between attempts to connect to rank 0, which may not have started yet. The last one repeats."""
_CONNECT_S = 1.0
"""Lower limit of the timeout of one attempt, which is the heartbeat timeout, at most `_MAX_CONNECT_S`."""
_MAX_CONNECT_S = 5.0


class MemberSession(MembershipMonitor):
    """The monitor of a rank other than 0. Its only control connection, to rank 0, is `connections[0]`.

    Until `Start` it reconnects after a failure, trying `addresses` in turn. After it, a lost connection breaks the world.

    Args:
        make_hello: returns our request to join, for the local address of a connection.
    """

    def __init__(
        self,
        control_loop: ControlLoop,
        world: MonitoredWorld,
        member: Hello,
        heartbeat: HeartbeatConfig,
        secret: bytes,
        addresses: Sequence[tuple[str, int]],
        bind_host: str,
        make_hello: Callable[[str], Hello],
    ) -> None:
        super().__init__(control_loop, world, member, heartbeat)
        self._addresses = addresses
        self._bind_host = bind_host
        self._secret = secret
        self._make_hello = make_hello
        self._attempt = 0
        self._joining: asyncio.Task[None] = control_loop.create_task(self._join(0.0))

    @property
    def _address(self) -> tuple[str, int]:
        return self._addresses[self._attempt % len(self._addresses)]

    def close(self) -> None:
        super().close()
        self._joining.cancel()

    async def _join(self, pause_s: float) -> None:
        """Connect to rank 0 after a pause, and ask to join."""
        await asyncio.sleep(pause_s)
        timeout_s = min(max(self._heartbeat.timeout_s, _CONNECT_S), _MAX_CONNECT_S)
        try:
            sock = await dial(self._address, self._secret, self._make_hello, timeout_s, self._bind_host)
        except RefusedError as error:
            self._on_refused(str(error))
        except (OSError, ValueError) as error:
            self._retry(reason_of(error))
        else:
            self.connections[0] = ControlConnection(self._control_loop, sock, self)
            awaited = f"generation {self.member.generation}" if self.member.generation else "the world"
            self._world.on_join_failed(f"rank 0 answered, but {awaited} did not start there", final=False)

    def _retry(self, reason: str) -> None:
        self._world.on_join_failed(reason, final=False)
        if not self._closed:
            pause_s = _RETRY_S[min(self._attempt, len(_RETRY_S) - 1)]
            self._attempt += 1
            self._joining = self._control_loop.create_task(self._join(pause_s))

    def _on_refused(self, reason: str) -> None:
        self._world.on_join_failed(reason, final=True)
        self.close()

    # -- connected -----------------------------------------------------------------------------------------------------------

    def on_frame(self, connection: ControlConnection, frame: Frame) -> None:
        match frame:
            case Refuse(reason, retry) if not self.started:
                self.connections.pop(0).close()
                (self._retry if retry else self._on_refused)(shown(reason))
            case Start(generation, _, addresses) if not self.started:
                if len(addresses) != self.member.size:
                    raise FrameError(f"{len(addresses)} addresses in a world of {self.member.size}")
                host, port = self._address  # where we have reached rank 0
                self.started = True
                self.member = replace(self.member, generation=generation)
                addresses = (replace(addresses[0], host=host, port=port), *addresses[1:])
                self._world.on_all_joined(replace(frame, addresses=addresses))
            case _ if self.started:
                self._on_common_frame(connection, frame)
            case Heartbeat():
                pass
            case _:
                raise FrameError(f"unexpected {type(frame).__name__} before the start")

    def _on_connection_lost(self, rank: int, cause: Cause, detail: str) -> None:
        self.connections.pop(rank, None)
        if not self.started:
            self._retry(f"the connection to rank 0 was lost: {detail}")
        elif not self._member_left:
            self._world.on_member_failed(rank, cause, detail)
