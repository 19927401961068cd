"""Bundles: models as data. The format, its reader, and the checks before anything is computed.

Imports torch and safetensors, and evaluates nothing of what it reads. Start reading at `graph`, then `checking` and `files`.
"""
