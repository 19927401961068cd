"""Deployment: containers, Kubernetes, systemd, Slurm, Ray, HAProxy and monitoring.

`ray` starts the processes of `multiworld serve` on a Ray cluster; `health.py` is the health check of containers.
"""
