"""Requests of the HTTP ports: limits, bodies, request ids, error responses, and TLS settings. The ports themselves are in `common.http`.

May import server.frontends.leader_pool, server.observability, server.errors, server.predictor, server.settings and common; imports
no routes. Start reading in open_request.py.
"""
