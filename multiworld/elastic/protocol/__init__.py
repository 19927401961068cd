"""The decisions of elastic worlds. Pure: events in, actions out, without clock and I/O.

It imports only `multiworld.errors`, `multiworld.texts`, msgspec and the standard library, so the simulation can drive the same code.
Start reading at `coordinator.py` (the members of the next view) and `member_state.py` (the state of one member), then `rounds.py`
(which operations finished) and `commit_protocol.py` (the steps of a call).
"""
