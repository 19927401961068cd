"""Example of one world per worker: a leader distributes images to workers. Start reading at README.md and `m8d.py`."""
