"""An HTTP port: uvicorn with strict parsing, limits on connections, and TLS.

The leader, the frontends and the workers' metrics port use it.
Start reading in server.py, then protocol.py.
"""
