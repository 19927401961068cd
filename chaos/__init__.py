"""Chaos: a load and a schedule of faults against a running service, and what came of it.

The way through: `images` and `load` ask and check answers, `observer` watches the service, `faults` is the catalogue of what is done to
it, `schedule` says in which order and to whom, `campaign` runs it all, `report` sums it up.
"""
