"""An HTTP port: uvicorn on a socket that the process opened, with a limit of connections and TLS.

Frontends, leaders and workers use it. Start reading in server.py. Slow heads are the task of the proxy in `deploy/haproxy`.
"""
