"""Example of `all_reduce`. Start reading at README.md and `m8d.py`."""
