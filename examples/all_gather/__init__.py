"""Example of `all_gather`. Start reading at README.md and `m8d.py`."""
