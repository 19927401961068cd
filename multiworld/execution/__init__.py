"""What operations run on: threads that may block, CUDA streams, and the process groups of c10d.

May import `multiworld.errors` and `multiworld.texts` only. Start reading at `worker_thread.py` and `process_group.py`.
"""
