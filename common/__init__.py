"""Code that leader, workers, frontends and CLI share. Imports only the `multiworld` library.

`config`: settings and logging; `wire`: messages between leader and worker; `metrics`: Prometheus families; `tracing`: OpenTelemetry setup;
`strict_http`: the HTTP/1.1 protocol of all ports.
"""
