"""The control plane: authenticated TCP connections for joining, heartbeats, failure reports and queries, served by one thread.

May import `multiworld.execution`, `multiworld.errors` and `multiworld.texts`. Start with loop.py (the control loop), then connection.py and
frames.py (what is sent).
"""
