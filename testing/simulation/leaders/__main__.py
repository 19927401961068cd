"""Run a scenario of failing leaders with one seed, or all of them with many.

    python -m multiworld_serving.testing.simulation.leaders --scenario everything --seed 7
    python -m multiworld_serving.testing.simulation.leaders --seeds 100

Exit status: 0 if every request was treated as it must be, 1 if not.
"""

from __future__ import annotations

import argparse
import sys

from multiworld_serving.testing.simulation.leaders.run import SCENARIOS, LeaderRun


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--scenario", choices=names, metavar="NAME", action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the load, in virtual time")
    options = parser.parse_args(arguments)
    for seed in range(options.seed, options.seed + options.seeds):
        for scenario in SCENARIOS:
            if options.scenario is None or scenario.name in options.scenario:
                run = LeaderRun(scenario, seed)
                try:
                    run.run(options.seconds)
                except Exception as error:  # noqa: BLE001 - every exception is a failure of the run
                    found = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
                    print(
                        f"{scenario.name}, seed {seed}: {type(found).__name__}: {found}\n{run.command(options.seconds)}"
                    )
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
