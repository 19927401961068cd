"""Versions of the model: partition into stages, serialized weights, version numbers, and the source of further versions.

Start with `stage_plan.py`. May import `models`, `common`, `server.predictor` and `server.leader_settings`; not `server.replicas`.
"""
