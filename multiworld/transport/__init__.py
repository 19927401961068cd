"""Connections between members of a world: messages with receive credits over TCP, polled by the event loop of the caller.

May import `multiworld.ops`, `multiworld.control`, `multiworld.execution` and `multiworld.errors`. Start reading at `connection.py`.
"""
