"""Processes of `multiworld serve`: leaders, frontends and workers, which the service forks and supervisors restart.

Start reading at `service.py`, which acts on signals, `models.py`, which says what runs, and `supervisor.py`, which restarts processes.
"""
