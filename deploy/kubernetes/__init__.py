"""Kubernetes deployment: kustomize base and overlays, and the generator of the PrometheusRule resource (`rules.py`)."""
