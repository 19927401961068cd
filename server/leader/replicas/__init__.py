"""The workers as the leader sees them: joining, placement, the link to each worker, quarantine and rollout of versions.

Start with `worker.py`, the record of a worker, and `reconcile.py`, which decides what each worker does next.

Where a dead worker is detected: not here. Each link is a world, and `multiworld/membership/monitor.py` detects that its other member has
closed its connection, sends no heartbeats, or has stalled. It breaks the world, with a cause. Here the failure is handled:

    worker_link.py   the pending receive of `WorkerLink.run` raises BrokenWorldException; the worker becomes "broken"
    registry.py      counts the failure, and `SchedulerDriver.remove` tells the scheduler, which reroutes the batches in flight
    reconcile.py     what to do now: a spare takes the slot, or a worker of another stage

Two failures of a live worker are detected in the service, which then breaks the world (`WorkerLink.fail`): the scheduler fails a replica
that returns no batch within `hang_timeout_s` or raises where others do not, and the link fails a worker that violates the protocol.
"""
