"""Writes modules as bundles: capture by torch.export, cuts, and comparison with the module.

The only place that executes code of the user. Imports nothing of the service. Start reading at `exporter`.
"""
