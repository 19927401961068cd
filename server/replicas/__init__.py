"""The workers as the leader sees them: joining, placement, the link to each worker, quarantine and rolling restart.

Start with `registry.py`. May import `server.versions`, `server.scheduling.events` and `server.observability`; not `server.pipeline`.

Where a dead worker is detected: not here. Each link is a world, and `multiworld/membership/monitor.py` detects that its other member has
closed its connection, sends no heartbeats, or has stalled. It breaks the world, with a cause. Here the failure is handled:

    worker_link.py   the pending receive of `WorkerLink.run` raises BrokenWorldException; the link becomes "broken" and tells its listener
    registry.py      `on_link_state` frees the slot, counts the failure, and reports `on_ended` to the leader
    replica_ids.py   turns that into a `ReplicaLost` for the scheduler, which reroutes the batches in flight

Two failures of a live worker are detected in the service, which then breaks the world (`WorkerLink.fail`): the scheduler fails a replica
that returns no batch within `hang_timeout_s` or raises where others do not, and the link fails a worker that violates the protocol.
"""
