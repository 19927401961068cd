"""The program of a frontend: serves HTTP and gRPC, keeps each request until its response, and sends it to a leader.

Start reading at `main.py`. `api/` has the routes and formats, `http/` the life of a request, `auth/` the keys, `leaders/` the links to the
leaders and the choice between them, `observability/` metrics, events and traces.

May import: `multiworld`, `multiworld_serving.common` and `multiworld_serving.models`.
"""
