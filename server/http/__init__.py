"""The HTTP ports: uvicorn with connection limits and TLS, request bodies, and error responses.

May import server.observability, server.errors, server.predictor, server.settings and common; imports no routes. Start reading
in server.py, then protocol.py.
"""
