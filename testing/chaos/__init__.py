"""Fault injection into a running service under load, and a report of the effects.

`faults` is the catalogue of faults, `system` the access to processes and connections, `observer` polls the service, `campaign` runs
everything, `report` computes the results. Start reading at `campaign.py`. Imports `common` and `testing.load`.
"""
