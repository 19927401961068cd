"""Deployment: local processes, containers, Kubernetes, systemd, monitoring.

`processes` starts and supervises the leader, frontend and worker processes of `multiworld serve`; `health` is the container health
check. Imports `server.settings`, `workers` and `common`.
Start reading at `processes/supervisor.py`.
"""
