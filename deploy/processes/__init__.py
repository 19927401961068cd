"""Processes of `multiworld serve`: leaders, frontends and workers, forked from a fork server and restarted by supervisors.

Start reading at `service.py`, which says what it runs, and `supervisor.py`, which restarts processes.
"""
