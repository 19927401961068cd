"""`multiworld chaos`: hurt a service while clients ask it, and see what that costs them."""

import json
import os
import signal
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.service import ApiKeyFile, CaFile, ClientCertFile, ServiceError, access
from config import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from chaos.campaign import Findings, Plan
    from chaos.report import Report, Row
    from chaos.statistics import Spread
    from chaos.target import Target
    from config import Access

EPILOG = """
[bold]Examples[/bold]

multiworld chaos

multiworld chaos --faults kill,freeze --rounds 20 --json chaos.json --plot chaos.png

multiworld chaos --duration 30m --every 5s

multiworld serve 2> serve.log & multiworld chaos --url http://127.0.0.1:8000 --log serve.log

docker compose up -d --wait && multiworld chaos --compose multiworld

[bold]Exit status[/bold]: 0 nothing was lost, doubled or otherwise than expected, 1 something was, 2 bad usage.
"""

SERVICE = "The service"
LOAD = "Load"
FAULTS = "Faults"
OUTPUT = "What is shown"


def _option(name: str, metavar: str, text: str, panel: str, **more: object) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(name, metavar=metavar, help=text, rich_help_panel=panel, **more)  # type: ignore[arg-type]
    return info


Url = Annotated[
    str | None, _option("--url", "URL", "A running service on this machine, instead of one of our own.", SERVICE)
]
Compose = Annotated[
    str | None,
    _option(
        "--compose", "PROJECT", "A running service in containers: the name of its Docker Compose project.", SERVICE
    ),
]
Log = Annotated[
    Path | None,
    _option("--log", "FILE", "With --url: the file with its log, which names its local workers' processes.", SERVICE),
]
Pid = Annotated[
    int | None, _option("--pid", "PID", "With --url: the leader's process, to watch what it holds.", SERVICE)
]
Sets = Annotated[
    list[str] | None,
    _option(
        "--set", "NAME=VALUE", "A setting of our own service, as `multiworld serve` has it; may be repeated.", SERVICE
    ),
]
Model = Annotated[str, _option("--model", "MODEL", "Model of our own service.", SERVICE)]
Weights = Annotated[str, _option("--weights", "WEIGHTS", "Weights of our own service.", SERVICE)]
Stages = Annotated[int, _option("--stages", "N", "Stages of our own service.", SERVICE, min=1)]
Replicas = Annotated[int, _option("--replicas", "N", "Replicas of each stage of our own service.", SERVICE, min=1)]
HeartbeatS = Annotated[
    float,
    _option(
        "--heartbeat-timeout-s", "SECONDS", "Silence after which the service gives a worker up.", SERVICE, min=0.01
    ),
]
GraceS = Annotated[
    float,
    _option(
        "--recovery-grace-s",
        "SECONDS",
        "How long the service keeps requests for a stage without replicas.",
        SERVICE,
        min=0,
    ),
]
Clients = Annotated[int, _option("--clients", "N", "Clients, each with one request at a time.", LOAD, min=1)]
Rate = Annotated[
    float | None,
    _option(
        "--rate",
        "HZ",
        "Requests a second that come whether or not earlier ones are answered, instead of --clients.",
        LOAD,
        min=0.01,
    ),
]
Image = Annotated[
    Path | None, _option("--image", "FILE", "Image to ask about; by default, eight are made from the seed.", LOAD)
]
Faults = Annotated[
    str | None,
    _option(
        "--faults", "NAME,…", "Kinds of faults; all that this machine can make by default. --list tells them.", FAULTS
    ),
]
ListThem = Annotated[
    bool, typer.Option("--list", help="Say what each fault does and what to expect, and end.", rich_help_panel=FAULTS)
]
Rounds = Annotated[int, _option("--rounds", "N", "How many times each kind of fault.", FAULTS, min=1)]
Duration = Annotated[
    str | None, _option("--duration", "TIME", "Go on for so long, such as 30m, instead of --rounds.", FAULTS)
]
Every = Annotated[
    str,
    _option(
        "--every",
        "TIME",
        "Least time between two faults. The next one always waits until the last one is over.",
        FAULTS,
    ),
]
Settle = Annotated[str, _option("--settle", "TIME", "Pause between recovery and the next fault.", FAULTS)]
Seed = Annotated[int, _option("--seed", "N", "Of the order, the victims and the images.", FAULTS)]
Protect = Annotated[
    str,
    _option(
        "--protect",
        "NAME,…",
        "Workers that are never hurt, such as local-0: a soak then sees whether they grow.",
        FAULTS,
    ),
]
JsonFile = Annotated[Path | None, _option("--json", "FILE", "Write everything that was found, for programs.", OUTPUT)]
PlotFile = Annotated[
    Path | None, _option("--plot", "FILE", "Draw latency over time (.png, .svg, .pdf); needs matplotlib.", OUTPUT)
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
    list_them: ListThem = False,
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
    """Kill, freeze, slow down and cut off workers of a service while clients ask it, and show what that cost them.

    Without --url or --compose, a service of our own is started for it, and stopped at the end. Every answer is compared with that of
    the service before anything was done to it.
    """
    from chaos.campaign import Plan
    from chaos.container_faults import FAULTS_OF_CONTAINERS
    from chaos.faults import CATALOGUE
    from chaos.images import image_file, photos
    from chaos.plot import check_plot
    from chaos.schedule import chosen_faults, duration_s
    from deploy.service import LocalService

    if list_them:
        _list()
        return 0
    plan = Plan(
        images=photos(8, seed) if image is None else [image_file(image)],
        faults=chosen_faults(faults, CATALOGUE if compose is None else FAULTS_OF_CONTAINERS),
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
            raise UserError(f"{file} cannot be written: {file.parent} is no folder that this user may write to")
    way_in = access(api_key_file, ca_file, client_cert_file)
    running = _running(url, compose, pid, log, way_in)
    if running is not None:
        if sets:
            raise UserError("--set: is for a service of our own; a running one has its settings")
        return _run(nullcontext(running), plan, json_file, plot_file)
    settings = {
        "model": model,
        "weights": weights,
        "stages": stages,
        "replicas": replicas,
        "heartbeat_timeout_s": heartbeat_timeout_s,
        "recovery_grace_s": recovery_grace_s,
    }
    return _run(LocalService(way_in=way_in, **settings | _parsed(sets or [])), plan, json_file, plot_file)  # type: ignore[arg-type]


def _running(
    url: str | None, compose: str | None, pid: int | None, log: Path | None, way_in: "Access"
) -> "Target | None":
    """The service that runs already; None when there is to be one of our own."""
    from chaos.containers import ComposeProject, ContainerError
    from chaos.target import RunningService

    if compose is None:
        return None if url is None else RunningService(url, pid=pid, log=log, way_in=way_in)
    if url is not None:
        raise UserError("--url and --compose: give one of them; a project says itself where it answers")
    try:
        return ComposeProject(compose, way_in=way_in)
    except ContainerError as error:
        raise ServiceError(str(error)) from error


def _parsed(sets: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in sets]
    if wrong := [name for name, equals, _ in pairs if not name or not equals]:
        raise UserError(f"--set {wrong[0]}: must be NAME=VALUE, such as image_size=64")
    return {name.replace("-", "_"): value for name, _, value in pairs}


def _run(
    service: "AbstractContextManager[Target]", plan: "Plan", json_file: Path | None, plot_file: Path | None
) -> int:
    import httpx

    from chaos.campaign import run
    from chaos.containers import ContainerError
    from chaos.observer import NotRecoveredError
    from chaos.plot import draw
    from chaos.report import summed_up, to_json
    from deploy.service import ServiceFailedError

    # Who ends us, by whichever signal, is told what was found until then, and a service of our own is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with service as target:
            found = run(target, plan, tell=lambda line: print(line, flush=True))
    except (ServiceFailedError, NotRecoveredError, ContainerError, httpx.HTTPError) as error:
        raise ServiceError(str(error) or type(error).__name__) from error
    report = summed_up(found)
    _show(found, report)
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(found, report), indent=1))
    if plot_file is not None:
        draw(found, plot_file)
    return 1 if report.verdict else 0


def _list() -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from chaos.container_faults import FAULTS_OF_CONTAINERS
    from cli.console import console

    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("fault", "whom", "what is done", "worlds that break", "here"):
        table.add_column(name)
    for fault in FAULTS_OF_CONTAINERS:
        causes = "perhaps" if fault.causes is None else ", ".join(sorted(fault.causes)) or "none"
        table.add_row(fault.name, fault.scope, fault.does, causes, fault.why_not() or "yes")
    console().print(table)


def _show(found: "Findings", report: "Report") -> None:
    from cli.console import console

    out = console()
    out.print(_table(report))
    for line in _lines(found, report):
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
        "double",
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
        *(str(count) for count in (row.times, row.failed, row.excused, row.doubles)),
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


def _lines(found: "Findings", report: "Report") -> list[str]:
    total = report.total
    return [
        f"{total.times} faults in {found.ended_s - found.started_s:.0f} s, {report.requests} requests: {total.failed} failed, "
        f"{total.excused} excused, {report.refused} refused with 429, {total.doubles} answered twice",
        *_resource_lines(found),
        *(f"LEFT OUT: {name}: {why}" for name, why in found.left_out.items()),
        *(f"warning: {warning}" for warning in found.warnings),
        *(f"NOT AS IT SHOULD BE: {complaint}" for complaint in report.verdict),
        *([] if report.verdict else ["ok: nothing lost, nothing answered twice, nothing unexpected"]),
    ]


def _resource_lines(found: "Findings") -> list[str]:
    from chaos.soak import RULE, SHORTEST_S

    judged = [series for series in found.resources if series.flat is not None]
    if not judged:
        return [
            f"threads, descriptors and memory: too short to tell, which takes {SHORTEST_S:.0f} s; --json has the figures"
        ]
    lines = (
        f"{s.process} {s.figure}: first {s.first:.0f}, last {s.last:.0f}, "
        f"median of the last quarter {s.last_quarter:.0f}: {'flat' if s.flat else 'GROWS'}"
        for s in judged
    )
    return [*lines, RULE]
