"""Randomized tests of worlds under faults, which run for half a minute in CI and for hours by `make soak`.

Start reading at worlds.py, the program. schedule.py derives the plan of a round from a seed, data.py the expected results, and part.py
contains the commands of each member.
"""
