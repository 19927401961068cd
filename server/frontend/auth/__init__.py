"""Authentication and authorization: API keys, join tokens, and reloading of credentials.

May import server.frontend.http, server.frontend.observability and common. Start reading in authorizer.py.
"""
