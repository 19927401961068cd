"""The command `multiworld`: the list of its verbs. `command.py` runs one of them."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from multiworld_serving.cli import command
from multiworld_serving.cli.verbs import (
    admin,
    bench,
    chaos,
    check,
    credentials,
    export,
    predict,
    processes,
    status,
)

VERBS: dict[str, Callable[[Any], int]] = {
    verb.__name__.replace("_", "-"): verb
    for verb in (
        *(processes.serve, processes.down, processes.frontend, processes.leader, processes.worker),
        *(predict.predict, export.export, check.check, status.status, bench.bench, chaos.chaos),
        *(admin.rolling_restart, admin.upgrade, admin.drain, admin.load_version, admin.unload, admin.models),
        *(credentials.key, credentials.token),
    )
}


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command line (that of this process if None), and end this process with its exit status."""
    command.run(VERBS, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (that of this process if None). Returns the exit status."""
    return command.main(VERBS, arguments)


if __name__ == "__main__":
    run()
