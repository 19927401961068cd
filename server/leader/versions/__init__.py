"""Versions of the model: partition into stages, serialized weights, version numbers, and the source of further versions.

Start with `stage_plan.py`. May import `models` and `common`; not `replicas`.
"""
