"""Elastic worlds: members join and leave while they live, and all-reduces survive the loss of one.

    async with ElasticManager() as elastic:
        world = await elastic.join("averages", "10.0.0.1", 29600)
        outcome = await world.all_reduce_multiple_with_retry(tensors, ReduceOp.AVG)

A rendezvous outside of the members says who makes up each epoch: `python -m multiworld.elastic`. Each epoch is an ordinary world of
multiworld, formed anew. docs/decisions/0013-elastic-worlds.md tells what is decided where, and why.
"""

from multiworld.elastic.elastic_manager import ElasticManager
from multiworld.elastic.elastic_world import ElasticWorld
from multiworld.elastic.errors import DesyncError, ElasticError, EvictedError, ReformError, RendezvousError
from multiworld.elastic.handle import AllReduceHandle
from multiworld.elastic.quantise import Quantization
from multiworld.elastic.rendezvous import ElasticRendezvous
from multiworld.elastic.retry import AllReduceOutcome

__all__ = [
    "AllReduceHandle",
    "AllReduceOutcome",
    "DesyncError",
    "ElasticError",
    "ElasticManager",
    "ElasticRendezvous",
    "ElasticWorld",
    "EvictedError",
    "Quantization",
    "ReformError",
    "RendezvousError",
]
