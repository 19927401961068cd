"""Metrics, traces and the metrics port of a worker. Nothing here can end a worker: see `common.metrics.guarded`."""
