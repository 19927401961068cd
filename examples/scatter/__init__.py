"""Example of `scatter`. Start reading at README.md and `m8d.py`."""
