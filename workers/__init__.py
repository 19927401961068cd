"""The worker process: joins a leader, loads the stages that it assigns, and computes batches.

Imports `common`, `models` and the `multiworld` library, never `server`. Start reading at `main`, then `leader_connection` and `session`.
"""
