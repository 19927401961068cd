"""`multiworld chaos`: inject faults into a service under load and report their effect on the clients."""

import json
import os
import signal
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiworld_serving.cli.console import table
from multiworld_serving.cli.options import assignments
from multiworld_serving.cli.service import Access, ServiceError
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.settings import setting
from multiworld_serving.testing.options import Plan

if TYPE_CHECKING:
    from multiworld_serving.testing.local_service import RunningService


class ChaosOptions(Access, Plan):
    """Options of `chaos`."""

    url: str | None = setting(None, "The service")
    """URL of a running service on this machine; by default one is started."""
    model: str | None = setting(None, "The service")
    """Model of the started service, by default resnet18. With --url the model under test, if that service has several."""
    weights: str = setting("random:0", "The service")
    """Weights of the started service."""
    stages: int = setting(2, "The service", ge=1)
    """Stages of the started service."""
    replicas: int = setting(2, "The service", ge=1)
    """Replicas per stage of the started service."""
    leaders: int = setting(2, "The service", ge=1)
    """Leaders of the started service."""
    sets: tuple[str, ...] = setting((), "The service", names=("--set",), metavar="NAME=VALUE")
    """Setting of the started service, as for `multiworld serve`; may be repeated."""
    faults: str | None = setting(None, "Faults", metavar="NAME,…")
    """Faults to inject; by default all that are possible on this machine. See --list."""
    list_faults: bool = setting(False, "Faults", names=("--list",))
    """List the faults with their expected effect, and exit."""
    json_file: Path | None = setting(None, names=("--json",), metavar="FILE")
    """Write the full result as JSON. A campaign that was interrupted continues when it is started with this file again."""

    def service(self) -> "AbstractContextManager[RunningService]":
        """Return the service under test, for the duration of a block. Raises UserError for options that exclude each other."""
        from multiworld_serving.testing.local_service import LocalService, RunningService

        if self.url is None:
            shared = {"weights", "stages", "replicas", "leaders", "heartbeat_timeout_s", "recovery_grace_s"}
            # All tensors travel over edges, also small ones, so that faults of edges have an effect.
            named = self.model_dump(include=shared) | {"edge_min_bytes": 0, "model": self.model or "resnet18"}
            return LocalService(credentials=self.credentials(), **named | assignments(self.sets))
        if self.sets:
            raise UserError("--set applies to a service that this command starts: omit --url")
        return nullcontext(RunningService(self.url, credentials=self.credentials(), model=self.model))


def chaos(options: ChaosOptions) -> int:
    """Kill, freeze, slow down and partition processes of a service under load, and report the effect on the clients.

    Without --url, starts a service and stops it at the end. Requests are generated for the model that the service serves, or
    read from --file. Every answer is compared with the answer of the service before the first fault.

    Examples:
        multiworld chaos
        multiworld chaos --faults kill,freeze --rounds 20 --json chaos.json
        multiworld chaos --duration 30m --model my.bundle
        multiworld serve 2> serve.log & multiworld chaos --url http://127.0.0.1:8000

    Exit status: 0 no request was lost or answered twice and every fault had the expected effect, 1 otherwise, 2 invalid usage.
    """
    import httpx

    from multiworld_serving.testing.chaos.campaign import chosen_faults, run
    from multiworld_serving.testing.chaos.observer import NotRecoveredError
    from multiworld_serving.testing.chaos.report import summarize
    from multiworld_serving.testing.load.requests import body_file
    from multiworld_serving.testing.local_service import ServiceFailedError

    if options.list_faults:
        _list()
        return 0
    if (json_file := options.json_file) is not None and not os.access(json_file.parent, os.W_OK):
        raise UserError(f"{json_file} cannot be written: {json_file.parent} is not a writable directory")
    faults, files = chosen_faults(options.faults), [body_file(path) for path in options.files]
    # Handle SIGTERM like Ctrl-C: print the results so far and stop the started service.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with options.service() as system:
            journal = None if json_file is None else json_file.with_name(f"{json_file.name}.part")
            result = run(system, options, faults, files, journal, partial(print, flush=True))
    except (ServiceFailedError, NotRecoveredError, httpx.HTTPError) as error:
        raise ServiceError(str(error) or type(error).__name__) from error
    report = summarize(result)
    _show(report)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1))
    return int(report["verdict"] != "ok")


def _list() -> None:
    from multiworld_serving.testing.chaos.faults import FAULTS

    rows = []
    for fault in FAULTS.values():
        causes = "any" if fault.causes is None else ", ".join(sorted(fault.causes)) or "none"
        rows.append((fault.name, fault.scope, causes, fault.unavailable_reason() or "yes", fault.description))
    print(table(("fault", "scope", "expected world failures", "available", "description"), rows))


def _show(report: dict[str, Any]) -> None:
    counts, times = ("times", "failed", "excused", "duplicates"), ("detect ms", "recover s", "latency ms")
    rows = [
        (
            row["fault"],
            *(str(row[name]) for name in counts),
            _spread(row["detect"], 1e3, ".0f"),
            _spread(row["recover"], 1, ".2f"),
            _spread(row["latency"], 1e3, ".0f"),
        )
        for row in [*report["faults"], report["total"]]
    ]
    print(table(("fault", *counts, *times), rows, numbers=(*counts, *times)))
    print("median / p99 / max; latency of requests between fault and recovery")
    print(
        f"{len(report['injections'])} faults in {report['duration_s']:.0f} s, {report['requests']} requests: {report['failed']} failed, "
        f"{report['excused']} excused, {report['refused']} refused with 429, {report['duplicates']} answered twice, {report['wrong']} wrong"
    )
    print(
        f"longest request {report['longest_s']:.2f} s; median / p99 / max ms: "
        f"{_spread(report['latency_without_faults'], 1e3, '.0f')} without faults, "
        f"{_spread(report['latency_during_faults'], 1e3, '.0f')} during faults"
    )
    for name, (before, after) in sorted(report["resources"].items()):
        print(f"{name}:", *(f"{what} {before[what]:.0f} -> {after[what]:.0f}" for what in before))
    for warning in report["warnings"]:
        print(f"warning: {warning}")
    if report["verdict"] == "ok":
        print("ok: no request lost, none answered twice, no unexpected effect")
    else:
        print(*(f"FAILED: {failure}" for failure in report["verdict"]), sep="\n")


def _spread(spread: dict[str, float] | None, factor: float, form: str) -> str:
    if spread is None:
        return "-"
    return " / ".join(format(spread[name] * factor, form) for name in ("median", "p99", "max"))
