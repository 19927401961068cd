"""Optimizes a stage for one device: rewrites its graph, compiles it, and compares the result with the stage as written.

Start reading at `tuning` and `optimizing`.
"""
