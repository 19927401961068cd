"""Which ranks belong to a world: joining at rank 0, failure detection, leaving, and the connections between all members.

Each member of a world has one `MembershipMonitor` (monitor.py), which runs on the control loop's thread. At rank 0 it has a control
connection to every other rank. At the other ranks it has one connection, to rank 0.
Rank 0 detects a dead member by its closed connection, by missed heartbeats, or by an event loop that does not advance, and reports it to
the other ranks. The other ranks detect only the death of rank 0; rank 0 reports every other failure to them. A failed data connection is
detected by the operations of either end. The world then waits briefly for the monitor to find the cause (`World.report`).

May import `multiworld.config`, the layers from `multiworld.collectives` down to `multiworld.control` and `multiworld.execution`,
`multiworld.errors` and `multiworld.texts`. Start with monitor.py (the protocol of the members), then forming.py (how a world forms).
"""
