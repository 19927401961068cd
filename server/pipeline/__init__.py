"""Runs the scheduler's decisions: requests, tensors, timers and futures.

Start with `driver.py`. May import `server.replicas`, `server.versions`, `server.scheduling` and `server.observability`.
"""
