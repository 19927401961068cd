"""The invariants of the scheduler, asserted after every event against a model of its own. Start reading at `checker.py`."""
