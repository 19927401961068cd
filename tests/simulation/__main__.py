"""Run the scheduler in virtual time: one seed, or new seeds until one fails or the time is over.

    python -m tests.simulation --scenario everything --seed 7 --trace
    python -m tests.simulation --hours 2

Exit status: 0 if no invariant was violated, 1 if one was.
"""

from __future__ import annotations

import argparse
import itertools
import secrets
import sys
import time
import traceback
from functools import partial

from tests.simulation.scenarios import SCENARIOS
from tests.simulation.simulator import Trace, run_case

_BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
_print = partial(print, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; return the exit status."""
    options = _parser().parse_args(arguments)
    first = secrets.randbelow(2**40) if options.seed is None else options.seed
    seeds = itertools.count(first) if options.seed is None else [first]
    ends_s = time.monotonic() + options.hours * 3600
    _print(f"starting at seed {first}, {options.events} events per run")
    cases = ((seed, name) for seed in seeds for name in options.scenario or _BY_NAME)
    for runs, (seed, name) in enumerate(cases):
        if options.seed is None and time.monotonic() >= ends_s:
            _print(f"{runs} runs, no failure")
            return 0
        trace: Trace | None = [] if options.trace else None
        try:
            run_case(_BY_NAME[name], seed, options.events, trace=trace)
        except Exception as error:  # noqa: BLE001 - every exception is a failure of the run
            for time_s, event, actions in trace or ():
                _print(f"t={time_s:.6f}  {event}", *(f"      -> {action}" for action in actions), sep="\n")
            _print("".join(traceback.format_exception(error)[-2:]))
            return 1
    _print("no failure")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--scenario", choices=_BY_NAME, metavar="NAME", action="append", help="run only this scenario; may be repeated"
    )
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--hours", type=float, default=1.0, help="how long new seeds are run")
    parser.add_argument("--events", type=int, default=20_000, help="number of events per run")
    parser.add_argument("--trace", action="store_true", help="show every event of a failing run with its actions")
    return parser


if __name__ == "__main__":
    sys.exit(main())
