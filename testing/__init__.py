"""Tools that test a running service: load and fault injection.

`load` generates requests and checks answers; `chaos` injects faults into a running service; `local_service` starts a service as a child
process. The verbs `bench` and `chaos`, the tests and the benchmarks use them. Imports `common` and `deploy` only.
"""
