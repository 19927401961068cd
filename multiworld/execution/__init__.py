"""What operations run on: threads that may block, CUDA streams, and the rendezvous of a process group of c10d.

May import `multiworld.errors` and `multiworld.texts` only. Start reading at `threads.py`.
"""
