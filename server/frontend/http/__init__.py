"""Requests of the HTTP ports: limits, bodies, request ids and error responses. The ports themselves are in `common.http`.

May import server.frontend.leaders, server.frontend.observability and common; imports no routes. Start reading in open_request.py.
"""
