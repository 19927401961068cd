"""`ElasticManager`: the elastic worlds of a process, by name."""

from collections.abc import Sequence
from types import TracebackType

from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.collectives.reductions import AnyReduceOp
from multiworld.elastic.agent import MemberAgent, MemberConfig
from multiworld.elastic.allreduce.quantization import Quantization
from multiworld.elastic.handle import AllReduceHandle
from multiworld.elastic.rendezvous import DEFAULT_PORT
from multiworld.elastic.retry import AllReduceOutcome
from multiworld.elastic.world import ElasticWorld
from multiworld.errors import WorldExistsError, WorldNotFoundError
from multiworld.manager import WorldManager


class ElasticManager:
    """Owns the elastic worlds of this process. Use it with `async with`. It starts nothing before the first `join`.

        async with ElasticManager() as elastic:
            world = await elastic.join("averages", "10.0.0.1", 29600)
            outcome = await world.all_reduce_multiple_with_retry(tensors, ReduceOp.AVG)

    Args:
        secret: shared by the rendezvous and all members. If it is empty, there is no authentication.
        heartbeat_interval_s: seconds between two heartbeats of a member.
        heartbeat_timeout_s: seconds without a heartbeat after which a member counts as lost.
    """

    def __init__(
        self, *, secret: bytes | str = b"", heartbeat_interval_s: float = 0.2, heartbeat_timeout_s: float = 1.0
    ) -> None:
        self._secret = secret
        self._pulse = (heartbeat_interval_s, heartbeat_timeout_s)
        self._worlds: dict[str, ElasticWorld] = {}
        self._managers: dict[str, WorldManager] = {}

    async def __aenter__(self) -> "ElasticManager":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        reform_timeout_s: float = 60.0,
    ) -> ElasticWorld:
        """Become a member and wait for the first epoch that includes this process.

        That is the world's first epoch, which starts when enough members have joined, or the epoch after all members await
        `update_membership`.

        Args:
            addr, port: address of the rendezvous.
            host: address at which the other members reach this process; "" uses the local address of the route to the rendezvous.
            timeout_s: seconds to wait for that epoch.
            form_timeout_s: seconds that one attempt to form an epoch may take.
            reform_timeout_s: seconds to wait for the next epoch after a failure, failed attempts included.
        Raises:
            WorldExistsError: this process is already a member of a world of that name.
            ReformError: no epoch included this process within `timeout_s`.
            RendezvousError: the rendezvous cannot be reached, or refuses this member.
            OSError: cannot listen at `host`.
        """
        if world_name in self._worlds or world_name in self._managers:
            raise WorldExistsError(world_name, "joined here already; leave it first")
        interval_s, silence_s = self._pulse
        manager = WorldManager(secret=self._secret, heartbeat_interval_s=interval_s, heartbeat_timeout_s=silence_s)
        self._managers[world_name] = manager
        terms = MemberConfig(
            addr=addr,
            port=port,
            secret=self._secret,
            host=host,
            form_timeout_s=form_timeout_s,
            reform_timeout_s=reform_timeout_s,
        )
        keeper = MemberAgent(manager, world_name, terms)
        try:
            await keeper.join(timeout_s)
        except BaseException:
            await keeper.close()
            await manager.aclose()
            del self._managers[world_name]
            raise
        world = self._worlds[world_name] = ElasticWorld(manager, world_name, keeper)
        return world

    def world(self, world_name: str) -> ElasticWorld:
        """Return the world of that name. Raises WorldNotFoundError."""
        try:
            return self._worlds[world_name]
        except KeyError:
            raise WorldNotFoundError(world_name, "never joined here, or left") from None

    async def leave(self, world_name: str) -> None:
        """Leave the world and free its resources. Raises WorldNotFoundError."""
        await self.world(world_name).leave()
        await self._managers[world_name].aclose()
        del self._worlds[world_name], self._managers[world_name]

    # -- operations, by world name -----------------------------------------------------------------------------------------------

    async def update_membership(self, world_name: str, *, timeout_s: float = 60.0) -> int:
        """Call `ElasticWorld.update_membership` of that world."""
        return await self.world(world_name).update_membership(timeout_s=timeout_s)

    async def all_reduce_multiple_with_retry(
        self,
        tensors: Sequence[Tensor],
        op: AnyReduceOp = ReduceOp.SUM,
        *,
        max_in_flight: int = 16,
        world_name: str,
        quantization: Quantization | None = None,
        timeout_s: float | None = None,
    ) -> AllReduceOutcome:
        """Call `ElasticWorld.all_reduce_multiple_with_retry` of that world."""
        return await self.world(world_name).all_reduce_multiple_with_retry(
            tensors, op, max_in_flight=max_in_flight, quantization=quantization, timeout_s=timeout_s
        )

    async def all_reduce_with_retry(
        self,
        tensor: Tensor,
        op: AnyReduceOp = ReduceOp.SUM,
        *,
        world_name: str,
        quantization: Quantization | None = None,
        timeout_s: float | None = None,
    ) -> AllReduceOutcome:
        """Call `ElasticWorld.all_reduce_with_retry` of that world."""
        return await self.world(world_name).all_reduce_with_retry(
            tensor, op, quantization=quantization, timeout_s=timeout_s
        )

    def all_reduce_async(
        self,
        tensor: Tensor,
        op: AnyReduceOp = ReduceOp.SUM,
        *,
        tag: int = 0,
        world_name: str,
        quantization: Quantization | None = None,
    ) -> AllReduceHandle:
        """Call `ElasticWorld.all_reduce_async` of that world."""
        return self.world(world_name).all_reduce_async(tensor, op, tag=tag, quantization=quantization)
