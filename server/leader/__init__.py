"""The program of a leader: schedules batches over the workers of one model.

Start reading at `main.py`, then at `leader.py`. `scheduling/` decides about batches, without I/O; `pipeline/` performs these decisions;
`replicas/` manages the workers; `versions/` holds the model versions; `sessions.py` has the links of the frontends.

May import: `multiworld`, `multiworld_serving.common` and `multiworld_serving.models`.
"""
