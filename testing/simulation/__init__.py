"""Deterministic simulation of the real scheduler in virtual time, with random loads and faults.

    simulator = Simulator(scenario, seed=7)
    simulator.run(10_000)  # raises AssertionError when an invariant is violated (checker.py lists them)

The same seed gives the same sequence of events. All random injections are recorded, so that a failing run can be replayed
with fewer of them (shrinking.py). `python -m multiworld_serving.testing.simulation` replays, shrinks and soaks.

Imports `server.scheduling` only. Start reading at `simulator.py`, then `scenarios.py` and `checker.py`.
"""
