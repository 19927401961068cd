"""Stages in Python: what users write, the objects that travel between them, and how a worker runs them.

`api.py` has the classes that users import from `multiworld_serving`. Start with `pipeline.py`. Imports nothing outside `models`.
"""
