"""Fault-tolerant model serving: pipeline stages on many workers, where a failure breaks one link only.

The sub-packages are links to the folders of the same names at the top of the repository (docs/decisions/0024-packages.md).
Start reading at docs/architecture.md, then `server/leader.py`.
"""
