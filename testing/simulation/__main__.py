"""Replay a failing run, shrink it to the injections it needs, or search for new failures.

    python -m multiworld_serving.testing.simulation replay --scenario everything --seed 7 --events 16000
    python -m multiworld_serving.testing.simulation shrink --scenario everything --seed 7 --events 16000
    python -m multiworld_serving.testing.simulation soak --hours 2

Exit status: 0 if no invariant was violated, 1 if one was.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from functools import partial

from multiworld_serving.testing.simulation.case import Case
from multiworld_serving.testing.simulation.scenarios import SCENARIOS
from multiworld_serving.testing.simulation.shrinking import Shrinker

_BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
_print = partial(print, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; return the exit status."""
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def _replay(options: argparse.Namespace) -> int:
    case = Case(_BY_NAME[options.scenario], options.seed)
    failure = case.run(options.events)
    if failure is None:
        _print(f"{options.scenario}, seed {options.seed}: no failure in {options.events} events")
        return 0
    if options.trace:
        failure = case.play(failure.recording, traced=True) or failure
    _print(failure.describe())
    return 1


def _shrink(options: argparse.Namespace) -> int:
    case = Case(_BY_NAME[options.scenario], options.seed)
    failure = case.run(options.events)
    if failure is None:
        _print(f"{options.scenario}, seed {options.seed}: no failure, nothing to shrink")
        return 0
    _print(f"{failure}, after {len(failure.recording.injections)} injections; shrinking ...")
    shrinker = Shrinker(case, failure, max_runs=options.max_runs, same_location=options.same_location)
    _print(shrinker.shrink().describe())
    return 1


def _soak(options: argparse.Namespace) -> int:
    """Run all scenarios with one seed, then with the next, until one fails or the time is over."""
    ends_s = time.monotonic() + options.hours * 3600
    seed = secrets.randbelow(2**40) if options.first_seed is None else options.first_seed
    _print(f"starting at seed {seed}, {options.events} events per run")
    runs = 0
    while True:
        for name in options.scenario or _BY_NAME:
            if time.monotonic() >= ends_s:
                _print(f"{runs} runs, no failure")
                return 0
            case = Case(_BY_NAME[name], seed)
            failure, runs = case.run(options.events), runs + 1
            if failure is not None:
                _print(f"{name}, seed {seed}: {failure}\n{case.commands(options.events)}")
                return 1
        seed += 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m multiworld_serving.testing.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(required=True, metavar="replay | shrink | soak")
    one = argparse.ArgumentParser(add_help=False)
    one.add_argument(
        "--scenario", choices=_BY_NAME, metavar="NAME", required=True, help="name of a scenario in scenarios.py"
    )
    one.add_argument("--seed", type=int, required=True)
    one.add_argument("--events", type=int, default=20_000, help="number of events")
    replay = verbs.add_parser("replay", parents=[one], help="run one scenario with one seed")
    replay.add_argument("--trace", action="store_true", help="show every event with the resulting actions")
    replay.set_defaults(run=_replay)
    shrink = verbs.add_parser("shrink", parents=[one], help="reduce a failure to the injections it needs")
    shrink.add_argument("--max-runs", type=int, default=2_000, help="maximum number of candidates to replay")
    shrink.add_argument("--same-location", action="store_true", help="accept only failures at the same source line")
    shrink.set_defaults(run=_shrink)
    long = verbs.add_parser("soak", help="run new seeds until one fails or the time is over")
    long.add_argument("--hours", type=float, default=1.0)
    long.add_argument("--events", type=int, default=20_000, help="number of events per run")
    long.add_argument("--first-seed", type=int, help="first seed; random by default")
    long.add_argument(
        "--scenario", choices=_BY_NAME, metavar="NAME", action="append", help="run only this scenario; may be repeated"
    )
    long.set_defaults(run=_soak)
    return parser


if __name__ == "__main__":
    sys.exit(main())
