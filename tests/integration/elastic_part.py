"""Commands for test members (members.py) that use elastic worlds."""

import hashlib
import os
from typing import Any

import torch
from torch import Tensor

from multiworld.collectives.channel import CollectiveChannel
from multiworld.collectives.quantization import Quantization
from multiworld.elastic import ElasticManager, ElasticWorld


class ElasticPart:
    """Each public method is a command."""

    def __init__(self) -> None:
        self.elastic = ElasticManager()
        self._tensors: list[Tensor] = []

    async def elastic_configure(self, **settings: Any) -> None:
        torch.set_num_threads(1)  # many members share one machine
        self.elastic = ElasticManager(**settings)

    async def elastic_join(self, world: str, port: int, addr: str = "127.0.0.1", **settings: Any) -> dict[str, Any]:
        return _described(await self.elastic.join(world, addr, port, **settings))

    async def elastic_state(self, world: str) -> dict[str, Any]:
        return _described(self.elastic.world(world))

    async def elastic_update(self, world: str, timeout_s: float = 60.0) -> int:
        return await self.elastic.world(world).update_membership(timeout_s=timeout_s)

    async def elastic_leave(self, world: str) -> None:
        await self.elastic.leave(world)

    async def elastic_reduce(
        self,
        world: str,
        weight: float,
        counts: list[int],
        timeout_s: float | None = None,
        quantization: Quantization | None = None,
    ) -> dict[str, Any]:
        """Reduce tensors; tensor i is filled with `weight * (i + 1)`. With quantization: `random_operands(weight)`, into other tensors."""
        operands = [torch.full((count,), weight * (index + 1)) for index, count in enumerate(counts)]
        if quantization:
            operands = random_operands(weight, counts)
        self._tensors = [torch.zeros_like(each) for each in operands] if quantization else operands
        outcome = await self.elastic.world(world).all_reduce_multiple_with_retry(
            operands, receive=self._tensors, quantization=quantization, timeout_s=timeout_s
        )
        if quantization:
            assert all(map(torch.equal, operands, random_operands(weight, counts))), "an operand changed"
        return {
            "success": outcome.success,
            "retries": outcome.retries,
            "size": outcome.world_size,
            "contributors": list(outcome.contributors),
            "sent": outcome.tx_bytes,
            "received": outcome.rx_bytes,
            "some": [tensor[::997].tolist() for tensor in self._tensors] if quantization else [],
            **await self.elastic_held(),
        }

    async def elastic_held(self) -> dict[str, Any]:
        """The tensors of the last call: a digest of their bits, and one number per tensor if all its elements are equal."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in self._tensors:
            digest.update(tensor.numpy().tobytes())
        firsts = [
            tensor[0].item() if tensor.numel() and bool((tensor == tensor[0]).all()) else float("nan")
            for tensor in self._tensors
        ]
        return {"bits": digest.hexdigest(), "values": firsts}

    async def elastic_fault(self, signum: int, messages: int) -> None:
        """Send this signal to this process after so many all-reduce messages have started."""
        post, begun = CollectiveChannel.send, 0

        def count(channel: CollectiveChannel, *arguments: Any) -> Any:
            nonlocal begun
            if channel.name == "all_reduce":
                begun += 1
                if begun == messages:
                    os.kill(os.getpid(), signum)
            return post(channel, *arguments)

        CollectiveChannel.send = count  # type: ignore[method-assign,assignment]


def random_operands(seed: float, counts: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(int(seed))
    return [torch.randn(count, generator=generator) for count in counts]


def _described(world: ElasticWorld) -> dict[str, Any]:
    return {"view": world.view_number, "rank": world.rank, "size": world.size, "id": world.member_id}
