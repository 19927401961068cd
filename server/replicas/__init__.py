"""The workers as the leader sees them: joining, placement, the link to each worker, quarantine and rolling restart.

Start with `registry.py`. May import `server.versions`, `server.scheduling.events` and `server.observability`; not `server.pipeline`.
"""
