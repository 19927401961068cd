"""Runs the scheduler's decisions: tensors, timers, futures and the rollout of versions.

Start with `driver.py`. May import `server.replicas`, `server.versions`, `server.scheduling` and `server.observability`.
"""
