"""`multiworld bench`: ask a service as many clients would, and see how fast it answers."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.service import (
    DEFAULT_URL,
    ApiKeyFile,
    AsJson,
    CaFile,
    ClientCertFile,
    ServiceError,
    Url,
    access,
    ask,
    service,
)
from config import Access, UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from chaos.load import Load, Question
    from chaos.measurement import Measurement

EPILOG = """
[bold]Examples[/bold]

multiworld bench

multiworld bench --clients 32 --duration 1m --plot bench.png

multiworld bench --rate 200 --json > bench.json

multiworld bench --tensors --images-per-request 8

[bold]Exit status[/bold]: 0 every request was answered or refused with 429, 1 one was not, 2 bad usage, 130 interrupted.
"""

_LOAD, _SHOWN = "Load", "What is shown"
_LIVE_S = 0.25
_LATELY_S = 2.0
_BUSY = 0.8
"""Share of a core from which the clients themselves may be what is slow."""


def _option(name: str, metavar: str, text: str, panel: str, **more: Any) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(name, metavar=metavar, help=text, rich_help_panel=panel, **more)
    return info


Clients = Annotated[
    int, _option("--clients", "N", "Closed loop: clients, each with one request at a time.", _LOAD, min=1)
]
Rate = Annotated[
    float | None,
    _option(
        "--rate",
        "HZ",
        "Open loop instead: requests a second, at random times (Poisson), answered or not.",
        _LOAD,
        min=0.01,
    ),
]
Duration = Annotated[str, _option("--duration", "TIME", "How long is measured, such as 30s or 5m.", _LOAD)]
WarmUp = Annotated[str, _option("--warm-up", "TIME", "How long is asked before it, and not counted.", _LOAD)]
Images = Annotated[
    list[Path] | None,
    _option("--image", "FILE", "Image to ask about, may be repeated; by default eight are made from the seed.", _LOAD),
]
Tensors = Annotated[
    bool,
    typer.Option(
        "--tensors", help="Ask with pixels by the Open Inference Protocol, not with image files.", rich_help_panel=_LOAD
    ),
]
PerRequest = Annotated[
    int, _option("--images-per-request", "N", "With --tensors: images in each request.", _LOAD, min=1)
]
RequestTimeoutS = Annotated[
    float, _option("--timeout-s", "SECONDS", "Longest wait for one answer; then it has failed.", _LOAD, min=0.001)
]
Seed = Annotated[int, _option("--seed", "N", "Of the images, and of the times of an open loop.", _LOAD)]
PlotFile = Annotated[
    Path | None, _option("--plot", "FILE", "Draw latency (.png, .svg, .pdf); needs matplotlib.", _SHOWN)
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
    """Ask a running service as many clients would, and show throughput and latency.

    A closed loop (--clients) finds how much the service can do; an open one (--rate) how long people wait when so many come,
    and there the time counts from when a request was due. Every answer to an image is compared with that of before the load.
    """
    from chaos.plot import check_plot
    from chaos.schedule import duration_s

    spans = duration_s(warm_up, "--warm-up"), duration_s(duration, "--duration")
    if images_per_request > 1 and not tensors:
        raise UserError("--images-per-request: needs --tensors; an image file is one request")
    if tensors and images:
        raise UserError("--tensors and --image cannot go together: tensors are made from the seed")
    if plot_file is not None:
        check_plot(plot_file)
    way_in, url = access(api_key_file, ca_file, client_cert_file), url.rstrip("/")
    served = _served(url, way_in)
    questions = _questions(url, images, images_per_request if tensors else 0, seed, way_in)
    load, (since_s, until_s), busy, interrupted = _run(
        url,
        questions,
        spans,
        {"clients": clients, "rate_hz": rate, "timeout_s": timeout_s, "seed": seed, "way_in": way_in},
    )
    found = _summed_up(load, since_s, until_s, images_per_request)
    kind = f"{rate:g} requests/s" if rate else f"{clients} clients"
    facts = {"service": served, "load": kind, "client_cores": round(busy, 2), **found.as_json()}
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        _show(found, f"{served}, {kind}, {'tensors' if tensors else 'images'}", busy)
    if plot_file is not None:
        _draw(load, since_s, until_s, f"{served}, {kind}", plot_file)
    return 130 if interrupted else 1 if found.failed or not found.answered else 0


def _served(url: str, way_in: Access) -> str:
    """What is served there. Raises ServiceError when nothing is."""
    with service(url, 30.0, way_in) as client:
        answer = ask(client, "GET", "/status", headers={"Accept": "application/json"})
    try:
        status = answer.json()
        return f"{status['model']} {status['version']}"
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"what answers at {url} is no service of this kind: its /status is none") from error


def _questions(
    url: str, images: list[Path] | None, tensor_images: int, seed: int, way_in: Access
) -> "Sequence[Question]":
    import httpx

    from chaos.images import image_file, photos
    from chaos.load import ask_quietly
    from chaos.tensors import tensor_questions
    from cli.service import refusal

    try:
        if tensor_images:
            return tensor_questions(url, images=tensor_images, seed=seed, way_in=way_in)
        return ask_quietly(url, [image_file(path) for path in images] if images else photos(8, seed), way_in=way_in)
    except httpx.HTTPStatusError as error:
        raise ServiceError(refusal(error.response)) from error
    except httpx.HTTPError as error:
        raise ServiceError(f"the connection to {url} failed: {error or type(error).__name__}") from error


def _run(
    url: str, questions: "Sequence[Question]", spans: tuple[float, float], options: dict[str, Any]
) -> tuple["Load", tuple[float, float], float, bool]:
    """The load; when measuring began and ended; how many cores the clients took; whether it was interrupted."""
    from chaos.load import load_on

    warm_up_s, measured_s = spans
    interrupted = False
    with load_on(url, questions, **options) as load:
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
    """Until the time is over; on a terminal, show how it goes."""
    from rich.live import Live

    from cli.console import progress_console

    until_s = since_s + measured_s
    console = progress_console()
    if not console.is_terminal:
        time.sleep(max(0.0, until_s - time.time()))
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while (now_s := time.time()) < until_s:
            live.update(_picture(load, now_s, since_s, measured_s), refresh=True)
            time.sleep(min(_LIVE_S, until_s - now_s))


def _picture(load: "Load", now_s: float, since_s: float, measured_s: float) -> "RenderableType":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from chaos.measurement import lately

    last = lately(load, now_s, _LATELY_S)
    done_s = now_s - since_s
    words = f"warm-up, {-done_s:.0f} s left" if done_s < 0 else f"{done_s:.0f} of {measured_s:.0f} s"
    words += f"   {last.answered / _LATELY_S:.0f} answers/s"
    if latency := last.latency_ms:
        words += f"   median {latency['p50']:.0f} ms   p99 {latency['p99']:.0f} ms"
    failed = Text(f"   {last.failed} failed", style="red") if last.failed else Text("")
    picture = Table.grid()  # a row each: a bar does not end its own line
    picture.add_row(ProgressBar(total=measured_s, completed=max(0.0, done_s), width=60))
    picture.add_row(Text(words) + failed)
    return picture


def _summed_up(load: "Load", since_s: float, until_s: float, images_per_request: int) -> "Measurement":
    from chaos.measurement import measured

    return measured(load.samples, since_s, until_s, unsent=load.unsent, images_per_request=images_per_request)


def _show(found: "Measurement", title: str, busy: float) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from cli.console import console

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
        out.print(Text(f"{found.unsent} requests were due and not sent: too many waited for an answer", style="red"))
    if busy > _BUSY:
        out.print(
            Text(f"the clients took {busy:.2f} of a core: they, not the service, may be what was slow", style="yellow")
        )


def _draw(load: "Load", since_s: float, until_s: float, title: str, file: Path) -> None:
    from chaos.latency_plot import draw_latency

    try:
        draw_latency(load.samples, since_s, until_s, title, file)
    except OSError as error:
        raise UserError(f"--plot {file}: {error.strerror}") from error
