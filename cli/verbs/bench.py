"""`multiworld bench`: measure throughput and latency of a running service under load."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from multiworld_serving.cli.options import AsJson, Clients, PlotFile, Rate, duration, flag, value
from multiworld_serving.cli.service import (
    DEFAULT_URL,
    Access,
    TimeoutS,
    Url,
    answer_errors,
    http_errors,
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

_LIVE_S = 0.25
_RECENT_S = 2.0
_CLIENT_BOUND = 0.8
"""Fraction of a core above which the clients themselves may limit the throughput."""


@dataclass(frozen=True)
class LoadOptions:
    """Options for the load."""

    panel: ClassVar[str] = "Load"
    clients: Clients = 8
    rate: Rate = None
    duration_s: Annotated[float, duration("Duration of the measurement, such as 30s or 5m.", "--duration")] = "30s"  # type: ignore[assignment]
    warm_up_s: Annotated[float, duration("Duration of the load before the measurement; not counted.", "--warm-up")] = (
        "3s"  # type: ignore[assignment]
    )
    images: Annotated[
        list[Path] | None, value("FILE", "Image to send, may be repeated; default: eight generated images.", "--image")
    ] = None
    tensors: Annotated[
        bool, flag("--tensors", "Send pixels with the Open Inference Protocol instead of image files.")
    ] = False
    images_per_request: Annotated[int, value("N", "With --tensors: images per request.", min=1)] = 1
    timeout_s: TimeoutS = 60.0
    seed: Annotated[int, value("N", "Seed of the generated images and of the arrival times of an open loop.")] = 0

    def __str__(self) -> str:
        return f"{self.rate:g} requests/s" if self.rate else f"{self.clients} clients"


@dataclass(frozen=True)
class _Run:
    """A finished load: its measured interval, the cores that the clients used, and whether Ctrl-C ended it."""

    load: "Load"
    since_s: float
    until_s: float
    client_cores: float
    interrupted: bool


def bench(
    *,
    url: Url = DEFAULT_URL,
    options: LoadOptions,
    as_json: AsJson = False,
    plot_file: PlotFile = None,
    access: Access,
) -> int:
    """Send requests to a running service and show throughput and latency.

    A closed loop (--clients) measures the maximum throughput. An open loop (--rate) measures latency at a given arrival rate;
    latency then counts from the scheduled arrival time. Every answer is compared with the answer of the service before the load.
    """
    from multiworld_serving.testing.load.measurement import measure
    from multiworld_serving.testing.plots import check_plot, draw_latency

    if options.images_per_request > 1 and not options.tensors:
        raise UserError("--images-per-request needs --tensors: a request with an image file has one image")
    if options.tensors and options.images:
        raise UserError("--tensors and --image exclude each other: tensors are generated from the seed")
    check_plot(plot_file)
    credentials, url = access.credentials(), url.rstrip("/")
    with open_client(url, 30.0, credentials) as client, answer_errors(url):
        status = send_request(client, "GET", "/status", headers={"Accept": "application/json"}).json()
        served = f"{status['model']} {status['version']}"
    run = _run(url, _reference_requests(url, options, credentials), options, credentials)
    images = options.images_per_request
    found = measure(run.load.samples, run.since_s, run.until_s, unsent=run.load.unsent, images_per_request=images)
    if as_json:
        facts = {"service": served, "load": str(options), "client_cores": round(run.client_cores, 2), **found.as_json()}
        print(json.dumps(facts, indent=1))
    else:
        _show(found, f"{served}, {options}, {'tensors' if options.tensors else 'images'}", run.client_cores)
    if plot_file is not None:
        draw_latency(run.load.samples, run.since_s, run.until_s, f"{served}, {options}", plot_file)
    return 130 if run.interrupted else 1 if found.failed or not found.answered else 0


def _reference_requests(url: str, options: LoadOptions, credentials: ClientCredentials) -> "Sequence[ReferenceRequest]":
    from multiworld_serving.testing.load.clients import record_reference_answers
    from multiworld_serving.testing.load.images import image_file, photos
    from multiworld_serving.testing.load.tensors import tensor_requests

    with http_errors(url):
        if options.tensors:
            images = options.images_per_request
            return tensor_requests(url, images=images, seed=options.seed, credentials=credentials)
        files = [image_file(path) for path in options.images or ()] or photos(8, options.seed)
        return record_reference_answers(url, files, credentials=credentials)


def _run(
    url: str, requests: "Sequence[ReferenceRequest]", options: LoadOptions, credentials: ClientCredentials
) -> _Run:
    from multiworld_serving.testing.load.clients import run_load

    interrupted = False
    with run_load(
        url,
        requests,
        clients=options.clients,
        rate_hz=options.rate,
        timeout_s=options.timeout_s,
        seed=options.seed,
        credentials=credentials,
    ) as load:
        since_s = time.time() + options.warm_up_s
        busy_s = time.process_time()
        try:
            _wait(load, since_s, options.duration_s)
        except KeyboardInterrupt:
            interrupted = True
        until_s = time.time()
        busy_s = time.process_time() - busy_s
    cores = busy_s / max(1e-9, options.warm_up_s + options.duration_s)
    return _Run(load, min(since_s, until_s), until_s, cores, interrupted)


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


def _show(found: "Measurement", title: str, busy: float) -> None:
    from rich.text import Text

    from multiworld_serving.cli.console import console, table

    out = console()
    out.print(Text(title, style="bold"))
    columns = ("answers/s", "images/s", *found.latency_ms)
    rows = table(*columns, numbers=columns, caption="latency in ms", caption_justify="right")
    rows.add_row(
        f"{found.answered_per_s:.1f}",
        f"{found.images_per_s:.1f}",
        *(f"{value:.1f}" for value in found.latency_ms.values()),
    )
    out.print(rows)
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
