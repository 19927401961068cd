"""`ElasticManager`: the elastic worlds of a process, by name."""

from functools import partial

from multiworld.config import HEARTBEAT_TIMEOUT_S
from multiworld.elastic.agent import MemberAgent, MemberConfig
from multiworld.elastic.rendezvous import DEFAULT_PORT
from multiworld.elastic.world import ElasticWorld
from multiworld.errors import WorldExistsError, WorldNotFoundError
from multiworld.manager import WorldManager


class ElasticManager:
    """Owns the elastic worlds of this process. Use it with `async with`. It starts nothing before the first `join`.

        async with ElasticManager() as elastic:
            world = await elastic.join("averages", "10.0.0.1", 29600)
            outcome = await world.all_reduce_multiple_with_retry(tensors, ReduceOp.AVG)

    Args:
        secret: shared by the rendezvous server and all members. If it is empty, there is no authentication.
        heartbeat_interval_s: seconds between two heartbeats of a member.
        heartbeat_timeout_s: seconds without a heartbeat after which a member counts as lost.
    """

    def __init__(
        self,
        *,
        secret: bytes | str = b"",
        heartbeat_interval_s: float = 0.2,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        self._secret = secret.encode() if isinstance(secret, str) else secret
        self._make_manager = partial(
            WorldManager,
            secret=self._secret,
            heartbeat_interval_s=heartbeat_interval_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            verify_collectives=False,
        )
        self._worlds: dict[str, ElasticWorld | None] = {}  # None while this process joins

    async def __aenter__(self) -> "ElasticManager":
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self._worlds):
            await self.leave(name)

    async def join(
        self,
        world_name: str,
        addr: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        host: str = "",
        timeout_s: float = 60.0,
        form_timeout_s: float = 10.0,
        view_change_timeout_s: float = 60.0,
    ) -> ElasticWorld:
        """Become a member and wait for the first view that includes this process.

        That is the world's first view, which starts when enough members have joined, or the view after all members await
        `update_membership`.

        Args:
            addr, port: address of the rendezvous server.
            host: address at which the other members reach this process; "" uses the local address of the route to the rendezvous server.
            timeout_s: seconds to wait for that view.
            form_timeout_s: seconds that one attempt to form the world of a view may take.
            view_change_timeout_s: seconds to wait for the next view after a failure, failed attempts included.
        Raises:
            WorldExistsError: this process is already a member of a world of that name.
            ViewChangeError: no view included this process within `timeout_s`.
            RendezvousError: the rendezvous server cannot be reached, or refuses this member.
            OSError: cannot listen at `host`.
        """
        if world_name in self._worlds:
            raise WorldExistsError(world_name, "this process is a member already; leave first")
        self._worlds[world_name] = None
        config = MemberConfig(addr, port, self._secret, host, form_timeout_s, view_change_timeout_s)
        agent = MemberAgent(self._make_manager(), world_name, config)
        try:
            await agent.join(timeout_s)
        except BaseException:
            await agent.close()
            del self._worlds[world_name]
            raise
        world = self._worlds[world_name] = ElasticWorld(world_name, agent)
        return world

    def world(self, world_name: str) -> ElasticWorld:
        """Return the world of that name. Raises WorldNotFoundError."""
        world = self._worlds.get(world_name)
        if world is None:
            raise WorldNotFoundError(world_name, "this process is not a member")
        return world

    async def leave(self, world_name: str) -> None:
        """Leave the world and free its resources. Idempotent: does nothing if this process is not a member."""
        world = self._worlds.get(world_name)
        if world is None:
            return
        await world.leave()
        if self._worlds.get(world_name) is world:  # a concurrent call may have removed it
            del self._worlds[world_name]
