"""Example of `all_reduce_async` and `agree` in an elastic world. Start reading at README.md and `m8d.py`."""
