"""Example of `broadcast`. Start reading at README.md and `m8d.py`."""
