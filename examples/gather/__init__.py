"""Example of `gather`. Start reading at README.md and `m8d.py`."""
