"""The HTTP API: inference routes, probes, status page, admin endpoints and the ASGI application.

May import server.frontend.{auth,http,observability} and what these import.
Start reading in app.py, then predict_route.py. openapi.json describes the paths.
"""
