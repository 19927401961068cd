"""Example of `isend` and `irecv`. Start reading at README.md and `m8d.py`."""
