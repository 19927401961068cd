"""Code that leader, workers, frontends and CLI share. Imports only the `multiworld` library.

`config`: settings and logging; `wire`: messages between leader and worker; `metrics`: Prometheus families;
`http`: the HTTP port of all processes; `threads`: threads that run while a block runs.
"""
