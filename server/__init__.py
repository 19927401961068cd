"""Frontends and leaders: HTTP, the scheduler, and the links to workers.

A leader: `main.py` is the entry point, `leader.py` the centre; `scheduling/` decides about batches; `pipeline/` performs these decisions;
`replicas/` manages the workers; `versions/` holds the model versions. A frontend: `frontends/main.py` is the entry point; `http/`,
`auth/` and `api/` serve requests; `frontends/` also connects both. `observability/` has metrics, events and traces. `predictor.py` has
the served model and its predictions, `administration.py` what operations decide and how they fail.

May import: `multiworld`, `multiworld_serving.common` and `multiworld_serving.models`.
"""
