"""Fault injection into a running service under load, and a report of the effects.

`faults` and `container_faults` are the catalogues of faults, `schedule` selects their order and targets, `observer` polls the
service, `campaign` runs everything, `report` computes the results. Start reading at `campaign.py`. Imports `common` and
`testing.load`.
"""
