"""The real scheduler in virtual time: tested under every kind of misfortune, and asked what a fleet would be worth.

    simulator = Simulator(scenario, seed=7)
    simulator.run(10_000)  # raises AssertionError as soon as a promise is broken (checker.py lists them)

The same seed gives the same run, event for event. What chance decides is recorded, so that a failing run can be played
again without parts of it (shrinking.py). `multiworld simulate` asks the planning questions (planning.py), and
`python -m simulation` replays, shrinks and soaks.
"""
