"""Metrics of a worker."""
