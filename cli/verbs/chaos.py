"""`multiworld chaos`: inject faults into a service under load and report their effect on the clients."""

import json
import os
import signal
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multiworld_serving.cli.service import ApiKeyFile, CaFile, ClientCertFile, ServiceError, access
from multiworld_serving.common.config import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from multiworld_serving.common.config import ClientCredentials
    from multiworld_serving.testing.chaos.campaign import CampaignResult, Plan
    from multiworld_serving.testing.chaos.report import Report, Row
    from multiworld_serving.testing.chaos.system_under_test import SystemUnderTest
    from multiworld_serving.testing.load.statistics import Spread

EPILOG = """
[bold]Examples[/bold]

multiworld chaos

multiworld chaos --faults kill,freeze --rounds 20 --json chaos.json --plot chaos.png

multiworld chaos --duration 30m --every 5s

multiworld serve 2> serve.log & multiworld chaos --url http://127.0.0.1:8000 --log serve.log

docker compose up -d --wait && multiworld chaos --compose multiworld

[bold]Exit status[/bold]: 0 no request was lost or answered twice and every fault had the expected effect, 1 otherwise, 2 invalid usage.
"""

SERVICE = "The service"
LOAD = "Load"
FAULTS = "Faults"
OUTPUT = "Output"


def _option(name: str, metavar: str, text: str, panel: str, **more: object) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(name, metavar=metavar, help=text, rich_help_panel=panel, **more)  # type: ignore[arg-type]
    return info


Url = Annotated[
    str | None, _option("--url", "URL", "URL of a running service on this machine; default: start one.", SERVICE)
]
Compose = Annotated[
    str | None,
    _option("--compose", "PROJECT", "Name of the Docker Compose project of a running service.", SERVICE),
]
Log = Annotated[
    Path | None,
    _option(
        "--log", "FILE", "With --url: log file of the service, to find the processes of its local workers.", SERVICE
    ),
]
Pid = Annotated[
    int | None, _option("--pid", "PID", "With --url: process id of the leader, to monitor its resources.", SERVICE)
]
Sets = Annotated[
    list[str] | None,
    _option(
        "--set", "NAME=VALUE", "Setting of the started service, as for `multiworld serve`; may be repeated.", SERVICE
    ),
]
Model = Annotated[str, _option("--model", "MODEL", "Model of the started service.", SERVICE)]
Weights = Annotated[str, _option("--weights", "WEIGHTS", "Weights of the started service.", SERVICE)]
Stages = Annotated[int, _option("--stages", "N", "Stages of the started service.", SERVICE, min=1)]
Replicas = Annotated[int, _option("--replicas", "N", "Replicas per stage of the started service.", SERVICE, min=1)]
HeartbeatS = Annotated[
    float,
    _option("--heartbeat-timeout-s", "SECONDS", "Heartbeat timeout of the service.", SERVICE, min=0.01),
]
GraceS = Annotated[
    float,
    _option(
        "--recovery-grace-s",
        "SECONDS",
        "How long the service keeps requests for a stage without replicas, in seconds.",
        SERVICE,
        min=0,
    ),
]
Clients = Annotated[
    int, _option("--clients", "N", "Closed loop: number of clients, each with one request at a time.", LOAD, min=1)
]
Rate = Annotated[
    float | None,
    _option(
        "--rate",
        "HZ",
        "Open loop instead of --clients: requests per second, independent of the answers.",
        LOAD,
        min=0.01,
    ),
]
Image = Annotated[Path | None, _option("--image", "FILE", "Image to send; default: eight generated images.", LOAD)]
Faults = Annotated[
    str | None,
    _option(
        "--faults", "NAME,…", "Faults to inject; default: all that are possible on this machine. See --list.", FAULTS
    ),
]
ListFaults = Annotated[
    bool, typer.Option("--list", help="List the faults with their expected effect, and exit.", rich_help_panel=FAULTS)
]
Rounds = Annotated[int, _option("--rounds", "N", "Number of injections of each fault.", FAULTS, min=1)]
Duration = Annotated[
    str | None, _option("--duration", "TIME", "Duration of the campaign, such as 30m, instead of --rounds.", FAULTS)
]
Every = Annotated[
    str,
    _option(
        "--every",
        "TIME",
        "Minimum time between the starts of two faults. Faults never overlap.",
        FAULTS,
    ),
]
Settle = Annotated[str, _option("--settle", "TIME", "Pause between recovery and the next fault.", FAULTS)]
Seed = Annotated[
    int, _option("--seed", "N", "Seed of the order of faults, of their targets and of the images.", FAULTS)
]
Protect = Annotated[
    str,
    _option(
        "--protect",
        "NAME,…",
        "Workers that are never a target, such as local-0, so that a long run can check their resource usage.",
        FAULTS,
    ),
]
JsonFile = Annotated[Path | None, _option("--json", "FILE", "Write the full result as JSON.", OUTPUT)]
PlotFile = Annotated[
    Path | None,
    _option("--plot", "FILE", "Write a plot of latency over time (.png, .svg, .pdf); needs matplotlib.", OUTPUT),
]


def chaos(
    url: Url = None,
    compose: Compose = None,
    log: Log = None,
    pid: Pid = None,
    model: Model = "resnet18",
    weights: Weights = "random:0",
    stages: Stages = 2,
    replicas: Replicas = 2,
    sets: Sets = None,
    heartbeat_timeout_s: HeartbeatS = 1.0,
    recovery_grace_s: GraceS = 15.0,
    clients: Clients = 8,
    rate: Rate = None,
    image: Image = None,
    faults: Faults = None,
    list_faults: ListFaults = False,
    rounds: Rounds = 1,
    duration: Duration = None,
    every: Every = "0s",
    settle: Settle = "2s",
    seed: Seed = 0,
    protect: Protect = "",
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
    api_key_file: ApiKeyFile = None,
    ca_file: CaFile = None,
    client_cert_file: ClientCertFile = None,
) -> int:
    """Kill, freeze, slow down and partition workers of a service under load, and report the effect on the clients.

    Without --url or --compose, starts a service and stops it at the end. Every answer is compared with the answer of the
    service before the first fault.
    """
    from multiworld_serving.testing.chaos.campaign import Plan
    from multiworld_serving.testing.chaos.container_faults import ALL_FAULTS
    from multiworld_serving.testing.chaos.faults import CATALOGUE
    from multiworld_serving.testing.chaos.plot import check_plot
    from multiworld_serving.testing.chaos.schedule import chosen_faults, duration_s
    from multiworld_serving.testing.load.images import image_file, photos
    from multiworld_serving.testing.local_service import LocalService

    if list_faults:
        _list()
        return 0
    plan = Plan(
        images=photos(8, seed) if image is None else [image_file(image)],
        faults=chosen_faults(faults, CATALOGUE if compose is None else ALL_FAULTS),
        clients=clients,
        rate_hz=rate,
        rounds=rounds,
        duration_s=None if duration is None else duration_s(duration, "--duration"),
        every_s=duration_s(every, "--every"),
        settle_s=duration_s(settle, "--settle"),
        seed=seed,
        protected=frozenset(name for name in protect.split(",") if name),
        heartbeat_timeout_s=heartbeat_timeout_s,
        grace_s=recovery_grace_s,
    )
    if plot_file is not None:
        check_plot(plot_file)
    for file in filter(None, (json_file, plot_file)):
        if not os.access(file.parent, os.W_OK):
            raise UserError(f"{file} cannot be written: {file.parent} is not a writable directory")
    credentials = access(api_key_file, ca_file, client_cert_file)
    running = _running(url, compose, pid, log, credentials)
    if running is not None:
        if sets:
            raise UserError(
                "--set cannot be used with --url or --compose: it applies to a service that this command starts"
            )
        return _run(nullcontext(running), plan, json_file, plot_file)
    settings = {
        "model": model,
        "weights": weights,
        "stages": stages,
        "replicas": replicas,
        "heartbeat_timeout_s": heartbeat_timeout_s,
        "recovery_grace_s": recovery_grace_s,
    }
    service = LocalService(credentials=credentials, **settings | _parse_settings(sets or []))  # type: ignore[arg-type]
    return _run(service, plan, json_file, plot_file)


def _running(
    url: str | None, compose: str | None, pid: int | None, log: Path | None, credentials: "ClientCredentials"
) -> "SystemUnderTest | None":
    """Return the running service; None if one is to be started."""
    from multiworld_serving.testing.chaos.containers import ComposeProject, ContainerError
    from multiworld_serving.testing.chaos.system_under_test import RunningService

    if compose is None:
        return None if url is None else RunningService(url, pid=pid, log=log, credentials=credentials)
    if url is not None:
        raise UserError("--url and --compose exclude each other: the URL of a Compose project is found automatically")
    try:
        return ComposeProject(compose, credentials=credentials)
    except ContainerError as error:
        raise ServiceError(str(error)) from error


def _parse_settings(sets: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in sets]
    if wrong := [name for name, equals, _ in pairs if not name or not equals]:
        raise UserError(f"--set {wrong[0]}: must be NAME=VALUE, such as image_size=64")
    return {name.replace("-", "_"): value for name, _, value in pairs}


def _run(
    service: "AbstractContextManager[SystemUnderTest]", plan: "Plan", json_file: Path | None, plot_file: Path | None
) -> int:
    import httpx

    from multiworld_serving.testing.chaos.campaign import run
    from multiworld_serving.testing.chaos.containers import ContainerError
    from multiworld_serving.testing.chaos.observer import NotRecoveredError
    from multiworld_serving.testing.chaos.plot import draw
    from multiworld_serving.testing.chaos.report import summarize, to_json
    from multiworld_serving.testing.local_service import ServiceFailedError

    # Handle SIGTERM like Ctrl-C: print the results so far and stop the started service.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with service as system:
            result = run(system, plan, log=lambda line: print(line, flush=True))
    except (ServiceFailedError, NotRecoveredError, ContainerError, httpx.HTTPError) as error:
        raise ServiceError(str(error) or type(error).__name__) from error
    report = summarize(result)
    _show(result, report)
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(result, report), indent=1))
    if plot_file is not None:
        draw(result, plot_file)
    return 1 if report.verdict else 0


def _list() -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from multiworld_serving.cli.console import console
    from multiworld_serving.testing.chaos.container_faults import ALL_FAULTS

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("fault", "scope", "description", "expected world failures", "available"):
        table.add_column(name)
    for fault in ALL_FAULTS:
        causes = "any" if fault.causes is None else ", ".join(sorted(fault.causes)) or "none"
        table.add_row(fault.name, fault.scope, fault.description, causes, fault.unavailable_reason() or "yes")
    console().print(table)


def _show(result: "CampaignResult", report: "Report") -> None:
    from multiworld_serving.cli.console import console

    out = console()
    out.print(_table(report))
    for line in _lines(result, report):
        out.print(line, markup=False)


def _table(report: "Report") -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        caption="detect, reroute, recover: median / p99 / max; latency: median / p99",
    )
    table.add_column("fault")
    headings = (
        "times",
        "failed",
        "excused",
        "duplicate",
        "detect ms",
        "reroute ms",
        "recover s",
        "before ms",
        "during ms",
        "after ms",
    )
    for name in headings:
        table.add_column(name, justify="right")
    for row in [*report.rows, report.total]:
        table.add_row(*_cells(row), end_section=row is report.rows[-1])
    return table


def _cells(row: "Row") -> list[str]:
    return [
        row.fault,
        *(str(count) for count in (row.times, row.failed, row.excused, row.duplicates)),
        _spread(row.detect, 1e3, ".0f"),
        _spread(row.reroute, 1e3, ".0f"),
        _spread(row.recover, 1, ".2f"),
        *(_latency(spread) for spread in (row.before, row.during, row.after)),
    ]


def _spread(spread: "Spread", factor: float, form: str) -> str:
    if not spread.count:
        return "-"
    return " / ".join(format(value * factor, form) for value in (spread.median, spread.p99, spread.max))


def _latency(spread: "Spread") -> str:
    return f"{spread.median * 1e3:.0f} / {spread.p99 * 1e3:.0f}" if spread.count else "-"


def _lines(result: "CampaignResult", report: "Report") -> list[str]:
    total = report.total
    return [
        f"{total.times} faults in {result.ended_s - result.started_s:.0f} s, {report.requests} requests: {total.failed} failed, "
        f"{total.excused} excused, {report.refused} refused with 429, {total.duplicates} answered twice",
        *_resource_lines(result),
        *(f"SKIPPED: {name}: {why}" for name, why in result.skipped.items()),
        *(f"warning: {warning}" for warning in result.warnings),
        *(f"FAILED: {failure}" for failure in report.verdict),
        *([] if report.verdict else ["ok: no request lost, none answered twice, no unexpected effect"]),
    ]


def _resource_lines(result: "CampaignResult") -> list[str]:
    from multiworld_serving.testing.chaos.soak import RULE, SHORTEST_S

    judged = [series for series in result.resources if series.flat is not None]
    if not judged:
        return [
            f"threads, descriptors and memory: not judged, the run was shorter than {SHORTEST_S:.0f} s; --json has the values"
        ]
    lines = (
        f"{s.process} {s.figure}: first {s.first:.0f}, last {s.last:.0f}, "
        f"median of the last quarter {s.last_quarter:.0f}: {'flat' if s.flat else 'GROWS'}"
        for s in judged
    )
    return [*lines, RULE]
