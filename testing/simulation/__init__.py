"""Deterministic simulation of the real scheduler in virtual time, with random loads and faults.

    simulator = Simulator(scenario, seed=7)
    simulator.run(10_000)  # raises AssertionError when an invariant is violated (checker.py lists them)

The same seed gives the same sequence of events. `python -m multiworld_serving.testing.simulation` replays and soaks.

Imports `server.scheduling` only. Start reading at `simulator.py`, then `scenarios.py` and `checker.py`.
"""
