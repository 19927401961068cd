"""Example of `reduce`. Start reading at README.md and `m8d.py`."""
