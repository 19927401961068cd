"""Handlers: the user's code that turns the body of `POST /predict` into inputs of the model, and its outputs into a body.

A handler runs in processes of its own (`program.py`), so that one that crashes or does not return never ends or blocks the frontend.
`processes.py` starts, asks and replaces them; `exchange.py` is what both send each other; `route.py` is the route.
"""
