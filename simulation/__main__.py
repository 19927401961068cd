"""Replay a failing run, shrink it to what matters, or look for new ones for hours.

    python -m simulation replay --scenario everything --seed 7 --events 14000
    python -m simulation shrink --scenario everything --seed 7 --events 14000
    python -m simulation soak --hours 2

Exit status: 0 if no promise was broken, 1 if one was.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from functools import partial

from simulation.report import describe
from simulation.scenarios import SCENARIOS
from simulation.shrinking import Shrinker
from simulation.soak import soak
from simulation.verdict import Case

_BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
_say = partial(print, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def _replay(options: argparse.Namespace) -> int:
    case = Case(_BY_NAME[options.scenario], options.seed)
    failure = case.run(options.events)
    if failure is None:
        _say(f"{options.scenario}, seed {options.seed}: no promise was broken in {options.events} events")
        return 0
    if options.trace:
        failure = case.play(failure.recording, traced=True) or failure
    _say(describe(failure))
    return 1


def _shrink(options: argparse.Namespace) -> int:
    case = Case(_BY_NAME[options.scenario], options.seed)
    failure = case.run(options.events)
    if failure is None:
        _say(f"{options.scenario}, seed {options.seed}: no promise was broken, there is nothing to shrink")
        return 0
    _say(f"{failure}, after {len(failure.recording.injections)} injections; shrinking ...")
    _say(describe(Shrinker(case, failure, max_runs=options.max_runs, same_place=options.same_place).shrink()))
    return 1


def _soak(options: argparse.Namespace) -> int:
    scenarios = [_BY_NAME[name] for name in options.scenario or _BY_NAME]
    first_seed = secrets.randbelow(2**40) if options.first_seed is None else options.first_seed
    _say(f"{len(scenarios)} scenarios, {options.events} events a run, from seed {first_seed} on")
    tally = soak(
        scenarios,
        first_seed=first_seed,
        events=options.events,
        lasts_s=options.hours * 3600,
        processes=options.processes,
        say=_say,
    )
    _say(f"{tally.runs} runs, {tally.events:,} events, {len(tally.failures)} failed")
    return 1 if tally.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar="replay | shrink | soak")
    one = argparse.ArgumentParser(add_help=False)
    one.add_argument("--scenario", choices=_BY_NAME, metavar="NAME", required=True, help="a name out of scenarios.py")
    one.add_argument("--seed", type=int, required=True)
    one.add_argument("--events", type=int, default=20_000, help="events of the run")
    replay = verbs.add_parser("replay", parents=[one], help="run one scenario with one seed")
    replay.add_argument("--trace", action="store_true", help="show every event with the scheduler's actions")
    replay.set_defaults(run=_replay)
    shrink = verbs.add_parser("shrink", parents=[one], help="find the few injections that a failure needs")
    shrink.add_argument("--max-runs", type=int, default=2_000, help="candidates to play at most")
    shrink.add_argument("--same-place", action="store_true", help="do not take a failure at another line for this one")
    shrink.set_defaults(run=_shrink)
    long = verbs.add_parser("soak", help="fresh seeds until one fails or the time is up")
    long.add_argument("--hours", type=float, default=1.0)
    long.add_argument("--events", type=int, default=20_000, help="events a run")
    long.add_argument("--first-seed", type=int, help="a fresh one unless given")
    long.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    long.add_argument("--scenario", choices=_BY_NAME, metavar="NAME", action="append", help="only this one; repeatable")
    long.set_defaults(run=_soak)
    return parser


if __name__ == "__main__":
    sys.exit(main())
