"""Metrics of a worker. Nothing here can end a worker: see `common.observers`."""
