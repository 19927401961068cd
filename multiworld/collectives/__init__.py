"""Collectives over the connections of a world, or through c10d, and the check that all members start the same collective.

May import `multiworld.transport`, `multiworld.ops`, `multiworld.control`, `multiworld.execution` and `multiworld.errors`. Start reading at
`movement.py` and `transfers.py` for collectives that move data, `reductions.py` and `allreduce.py` for reductions, `nccl.py` for NCCL.
"""
