"""Deterministic simulations in virtual time, with random loads and faults: the real scheduler, and elastic worlds (`elastic_cluster.py`).

    simulator = Simulator(scenario, seed=7)
    simulator.run(10_000)  # raises AssertionError when an invariant is violated (checker.py lists them)

The same seed gives the same sequence of events. `python -m tests.simulation` replays a seed, or runs new seeds.

Start reading at `simulator.py`, then `scenarios.py` and `invariants/checker.py`.
"""
