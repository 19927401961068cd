"""Example of `all_reduce_multiple_with_retry` in an elastic world. Start reading at README.md and `m8d.py`."""
