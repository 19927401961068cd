"""Operations: argument checks, buffers for the caller's tensors, and what the caller awaits.

May import `multiworld.control`, `multiworld.execution` and `multiworld.errors`. Nothing here sends data. Start reading at `operation.py`,
then `p2p.py`.
"""
