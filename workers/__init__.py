"""The worker process: joins leaders, loads the stages that they assign, and computes batches.

Imports `common`, `models` and the `multiworld` library, never `server`. Start reading at `main`, then `leader_connection` and `session`.
"""
