"""Example of `all_to_all`. Start reading at README.md and `m8d.py`."""
