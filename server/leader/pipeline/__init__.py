"""Runs the scheduler's decisions: requests, tensors, timers and futures.

Start with `driver.py`. May import `replicas`, `versions`, `scheduling` and `metrics` of the leader.
"""
