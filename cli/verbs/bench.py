"""`multiworld bench`: measure throughput and latency of a running service under load."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multiworld_serving.cli.service import (
    DEFAULT_URL,
    ApiKeyFile,
    AsJson,
    CaFile,
    ClientCertFile,
    ServiceError,
    Url,
    access,
    open_client,
    send_request,
)
from multiworld_serving.common.config import ClientCredentials, UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from multiworld_serving.testing.load.clients import Load, ReferenceRequest
    from multiworld_serving.testing.load.measurement import Measurement

EPILOG = """
[bold]Examples[/bold]

multiworld bench

multiworld bench --clients 32 --duration 1m --plot bench.png

multiworld bench --rate 200 --json > bench.json

multiworld bench --tensors --images-per-request 8

[bold]Exit status[/bold]: 0 every request was answered or refused with 429, 1 at least one failed, 2 invalid usage, 130 interrupted.
"""

_LOAD, _OUTPUT = "Load", "Output"
_LIVE_S = 0.25
_RECENT_S = 2.0
_CLIENT_BOUND = 0.8
"""Fraction of a core above which the clients themselves may limit the throughput."""


def _option(name: str, metavar: str, text: str, panel: str, **more: Any) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(name, metavar=metavar, help=text, rich_help_panel=panel, **more)
    return info


Clients = Annotated[
    int, _option("--clients", "N", "Closed loop: number of clients, each with one request at a time.", _LOAD, min=1)
]
Rate = Annotated[
    float | None,
    _option(
        "--rate",
        "HZ",
        "Open loop: requests per second at random times (Poisson), independent of the answers.",
        _LOAD,
        min=0.01,
    ),
]
Duration = Annotated[str, _option("--duration", "TIME", "Duration of the measurement, such as 30s or 5m.", _LOAD)]
WarmUp = Annotated[
    str, _option("--warm-up", "TIME", "Duration of the load before the measurement; not counted.", _LOAD)
]
Images = Annotated[
    list[Path] | None,
    _option("--image", "FILE", "Image to send, may be repeated; default: eight generated images.", _LOAD),
]
Tensors = Annotated[
    bool,
    typer.Option(
        "--tensors", help="Send pixels with the Open Inference Protocol instead of image files.", rich_help_panel=_LOAD
    ),
]
PerRequest = Annotated[int, _option("--images-per-request", "N", "With --tensors: images per request.", _LOAD, min=1)]
RequestTimeoutS = Annotated[
    float, _option("--timeout-s", "SECONDS", "Timeout of one request, in seconds.", _LOAD, min=0.001)
]
Seed = Annotated[
    int, _option("--seed", "N", "Seed of the generated images and of the arrival times of an open loop.", _LOAD)
]
PlotFile = Annotated[
    Path | None, _option("--plot", "FILE", "Write a latency plot (.png, .svg, .pdf); needs matplotlib.", _OUTPUT)
]


def bench(
    url: Url = DEFAULT_URL,
    clients: Clients = 8,
    rate: Rate = None,
    duration: Duration = "30s",
    warm_up: WarmUp = "3s",
    images: Images = None,
    tensors: Tensors = False,
    images_per_request: PerRequest = 1,
    timeout_s: RequestTimeoutS = 60.0,
    seed: Seed = 0,
    as_json: AsJson = False,
    plot_file: PlotFile = None,
    api_key_file: ApiKeyFile = None,
    ca_file: CaFile = None,
    client_cert_file: ClientCertFile = None,
) -> int:
    """Send requests to a running service and show throughput and latency.

    A closed loop (--clients) measures the maximum throughput. An open loop (--rate) measures latency at a given arrival rate;
    latency then counts from the scheduled arrival time. Every answer is compared with the answer of the service before the load.
    """
    from multiworld_serving.testing.chaos.plot import check_plot
    from multiworld_serving.testing.chaos.schedule import duration_s

    spans = duration_s(warm_up, "--warm-up"), duration_s(duration, "--duration")
    if images_per_request > 1 and not tensors:
        raise UserError("--images-per-request needs --tensors: a request with an image file has one image")
    if tensors and images:
        raise UserError("--tensors and --image exclude each other: tensors are generated from the seed")
    if plot_file is not None:
        check_plot(plot_file)
    credentials, url = access(api_key_file, ca_file, client_cert_file), url.rstrip("/")
    served = _served(url, credentials)
    requests = _reference_requests(url, images, images_per_request if tensors else 0, seed, credentials)
    load, (since_s, until_s), busy, interrupted = _run(
        url,
        requests,
        spans,
        {"clients": clients, "rate_hz": rate, "timeout_s": timeout_s, "seed": seed, "credentials": credentials},
    )
    found = _measure(load, since_s, until_s, images_per_request)
    kind = f"{rate:g} requests/s" if rate else f"{clients} clients"
    facts = {"service": served, "load": kind, "client_cores": round(busy, 2), **found.as_json()}
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        _show(found, f"{served}, {kind}, {'tensors' if tensors else 'images'}", busy)
    if plot_file is not None:
        _draw(load, since_s, until_s, f"{served}, {kind}", plot_file)
    return 130 if interrupted else 1 if found.failed or not found.answered else 0


def _served(url: str, credentials: ClientCredentials) -> str:
    """Return model and version of the service. Raises ServiceError if there is none."""
    with open_client(url, 30.0, credentials) as client:
        answer = send_request(client, "GET", "/status", headers={"Accept": "application/json"})
    try:
        status = answer.json()
        return f"{status['model']} {status['version']}"
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"{url} does not answer like a multiworld service: GET /status has another form") from error


def _reference_requests(
    url: str, images: list[Path] | None, tensor_images: int, seed: int, credentials: ClientCredentials
) -> "Sequence[ReferenceRequest]":
    import httpx

    from multiworld_serving.cli.service import error_message
    from multiworld_serving.testing.load.clients import record_reference_answers
    from multiworld_serving.testing.load.images import image_file, photos
    from multiworld_serving.testing.load.tensors import tensor_requests

    try:
        if tensor_images:
            return tensor_requests(url, images=tensor_images, seed=seed, credentials=credentials)
        return record_reference_answers(
            url, [image_file(path) for path in images] if images else photos(8, seed), credentials=credentials
        )
    except httpx.HTTPStatusError as error:
        raise ServiceError(error_message(error.response)) from error
    except httpx.HTTPError as error:
        raise ServiceError(f"the connection to {url} failed: {error or type(error).__name__}") from error


def _run(
    url: str, requests: "Sequence[ReferenceRequest]", spans: tuple[float, float], options: dict[str, Any]
) -> tuple["Load", tuple[float, float], float, bool]:
    """Run the load. Returns it, start and end of the measurement, cores used by the clients, and whether it was interrupted."""
    from multiworld_serving.testing.load.clients import run_load

    warm_up_s, measured_s = spans
    interrupted = False
    with run_load(url, requests, **options) as load:
        since_s = time.time() + warm_up_s
        busy_s = time.process_time()
        try:
            _wait(load, since_s, measured_s)
        except KeyboardInterrupt:
            interrupted = True
        until_s = time.time()
        busy_s = time.process_time() - busy_s
    since_s = min(since_s, until_s)
    return load, (since_s, until_s), busy_s / max(1e-9, warm_up_s + measured_s), interrupted


def _wait(load: "Load", since_s: float, measured_s: float) -> None:
    """Wait until the measurement ends; show progress if standard error is a terminal."""
    from rich.live import Live

    from multiworld_serving.cli.console import progress_console

    until_s = since_s + measured_s
    console = progress_console()
    if not console.is_terminal:
        time.sleep(max(0.0, until_s - time.time()))
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while (now_s := time.time()) < until_s:
            live.update(_progress_view(load, now_s, since_s, measured_s), refresh=True)
            time.sleep(min(_LIVE_S, until_s - now_s))


def _progress_view(load: "Load", now_s: float, since_s: float, measured_s: float) -> "RenderableType":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from multiworld_serving.testing.load.measurement import measure_recent

    last = measure_recent(load, now_s, _RECENT_S)
    done_s = now_s - since_s
    text = f"warm-up, {-done_s:.0f} s left" if done_s < 0 else f"{done_s:.0f} of {measured_s:.0f} s"
    text += f"   {last.answered / _RECENT_S:.0f} answers/s"
    if latency := last.latency_ms:
        text += f"   median {latency['p50']:.0f} ms   p99 {latency['p99']:.0f} ms"
    failed = Text(f"   {last.failed} failed", style="red") if last.failed else Text("")
    view = Table.grid()  # one row each: a progress bar does not end its line
    view.add_row(ProgressBar(total=measured_s, completed=max(0.0, done_s), width=60))
    view.add_row(Text(text) + failed)
    return view


def _measure(load: "Load", since_s: float, until_s: float, images_per_request: int) -> "Measurement":
    from multiworld_serving.testing.load.measurement import measure

    return measure(load.samples, since_s, until_s, unsent=load.unsent, images_per_request=images_per_request)


def _show(found: "Measurement", title: str, busy: float) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from multiworld_serving.cli.console import console

    out = console()
    out.print(Text(title, style="bold"))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, caption="latency in ms", caption_justify="right")
    for name in ("answers/s", "images/s", *found.latency_ms):
        table.add_column(name, justify="right")
    table.add_row(
        f"{found.answered_per_s:.1f}",
        f"{found.images_per_s:.1f}",
        *(f"{value:.1f}" for value in found.latency_ms.values()),
    )
    out.print(table)
    out.print(
        f"{found.requests} requests in {found.seconds:.1f} s: {found.answered} answered, {found.refused} refused with 429, ",
        end="",
    )
    out.print(Text(f"{found.failed} failed", style="red" if found.failed else "green"))
    for error, times in found.errors.items():
        out.print(Text(f"{times} times: {error}", style="red"))
    if found.unsent:
        out.print(Text(f"{found.unsent} requests were not sent: too many requests were in flight", style="red"))
    if busy > _CLIENT_BOUND:
        out.print(Text(f"the clients used {busy:.2f} cores and may have limited the throughput", style="yellow"))


def _draw(load: "Load", since_s: float, until_s: float, title: str, file: Path) -> None:
    from multiworld_serving.testing.load.latency_plot import draw_latency

    try:
        draw_latency(load.samples, since_s, until_s, title, file)
    except OSError as error:
        raise UserError(f"--plot {file}: {error.strerror}") from error
