"""What operations run on: threads that may block, serial queues, CUDA streams, and the process groups of c10d.

May import `multiworld.errors` and `multiworld.texts` only. Start reading at `blocking_pool.py` and `process_group.py`.
"""
