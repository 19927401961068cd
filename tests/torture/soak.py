"""Run the randomized tests for hours: the simulated scheduler, then worlds. First 1000 worlds of each kind begin and end.

    python -m tests.torture.soak --hours 3

Each randomized program gets half of the time and uses fresh seeds. A program ends at its first failure; the others run
regardless. Exit status: 0 if no program failed, 1 otherwise.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

PROGRAMS: dict[str, Callable[[float], Sequence[str]]] = {
    "the scheduler": lambda lasts_s: (
        "multiworld_serving.testing.simulation",
        "--hours",
        f"{lasts_s / 3600:.6f}",
    ),
    "worlds": lambda lasts_s: ("tests.torture.worlds", "--duration", f"{lasts_s:.0f}s"),
}
"""Subject of each randomized program → its module and arguments, for a duration in seconds."""
ENDED_WORLDS = ("pytest", "-q", "tests/integration/test_worlds_reclaim.py", "-k", "leak_nothing")
"""Threads, descriptors and memory stay the same."""
CYCLES = "1000"


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=1.0, help="of the randomized programs together; 1 unless given")
    share_s = parser.parse_args(arguments).hours * 3600 / len(PROGRAMS)
    failed = []
    commands = {f"{CYCLES} ended worlds": ENDED_WORLDS, **{name: each(share_s) for name, each in PROGRAMS.items()}}
    for name, command in commands.items():
        print(f"== {name}", flush=True)
        environment = {**os.environ, "MULTIWORLD_TEST_CYCLES": CYCLES}
        if subprocess.run([sys.executable, "-m", *command], check=False, env=environment).returncode:
            failed.append(name)
    print(f"== failed: {', '.join(failed)}" if failed else "== nothing was wrong", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
