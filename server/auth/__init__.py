"""Authentication and authorization: API keys, join tokens, and reloading of credentials.

May import server.http, server.observability, server.errors, server.settings and common. Start reading in authorizer.py.
"""
