"""Tools that test a running service or the scheduler: load, fault injection and simulation.

`load` generates requests and checks answers; `chaos` injects faults into a running service; `simulation` runs the scheduler in
virtual time; `local_service` starts a service as a child process. Used by the verbs
`bench` and `chaos`, by the tests and by the benchmarks. Imports `common` and `server.scheduling` only.
"""
