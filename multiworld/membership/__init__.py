"""Which ranks belong to a world: joining at rank 0, failure detection, leaving, and the connections between all members.

May import `multiworld.config`, the layers from `multiworld.collectives` down to `multiworld.control` and `multiworld.execution`,
`multiworld.errors` and `multiworld.texts`; not `multiworld.executor`. Start with monitor.py (the protocol of the members), then
bootstrap.py (how a world forms).
"""
