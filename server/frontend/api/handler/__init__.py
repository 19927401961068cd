"""Handlers: the user's code that turns the body of `POST /predict` into inputs of the model, and its outputs into a body.

A handler runs in processes of its own (`program.py`), so that one that crashes or does not return never ends or blocks the frontend.
`processes.py` starts, calls and replaces them; `route.py` is the route.
"""
