"""The serving process: HTTP frontend, scheduler and leader.

`main.py` is the entry point, `leader.py` the centre. `http/`, `auth/` and `api/` serve requests; `scheduling/` decides about batches;
`pipeline/` performs these decisions; `replicas/` manages the workers; `versions/` holds the model versions; `frontends/` runs
several HTTP processes; `observability/` has metrics, events and traces. `predictor.py` is the interface between HTTP and the pipeline.

May import: `multiworld`, `multiworld_serving.common` and `multiworld_serving.models`.
"""
