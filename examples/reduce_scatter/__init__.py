"""Example of `reduce_scatter`. Start reading at README.md and `m8d.py`."""
