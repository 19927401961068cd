"""Elastic worlds: members join and leave at run time, and all-reduces survive the loss of members.

    async with ElasticManager() as elastic:
        world = await elastic.join("averages", "10.0.0.1", 29600)
        outcome = await world.all_reduce_multiple_with_retry(tensors, ReduceOp.AVG)

A separate rendezvous process (`python -m multiworld.elastic`) decides the members of each view. Each view has an ordinary world of
its own. The design and its reasons are in docs/decisions/0013-elastic-worlds.md.

This package is the top layer of the library: it may import every other package of `multiworld`, and none of them imports it.
Start reading at `world.py` (the API), then `protocol/` (the decisions, without I/O), then `agent.py` (the I/O of a member).
"""

from multiworld.elastic.calls import AllReduceHandle, AllReduceOutcome
from multiworld.elastic.manager import ElasticManager
from multiworld.elastic.rendezvous import ElasticRendezvous
from multiworld.elastic.world import ElasticWorld
from multiworld.errors import DesyncError, ElasticError, EvictedError, RendezvousError, ViewChangeError

__all__ = [
    "AllReduceHandle",
    "AllReduceOutcome",
    "DesyncError",
    "ElasticError",
    "ElasticManager",
    "ElasticRendezvous",
    "ElasticWorld",
    "EvictedError",
    "RendezvousError",
    "ViewChangeError",
]
