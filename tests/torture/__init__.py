"""Randomised tests of worlds under faults, which run for a minute in CI and for hours by `make soak`.

Start reading at worlds.py, the program. schedule.py says from a seed what happens, data.py which results are right, and part.py is
what each member does.
"""
