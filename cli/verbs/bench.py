"""`multiworld bench`: measure throughput and latency of a running service under load."""

import json
import sys
import time
from typing import Any

from multiworld_serving.cli.console import table
from multiworld_serving.cli.options import AsJson
from multiworld_serving.cli.service import ServiceOptions, open_clients, read_status
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.settings import setting
from multiworld_serving.testing.options import Duration, LoadOptions, duration

_CLIENT_BOUND = 0.8
"""Fraction of a core above which the clients themselves may limit the throughput."""
_POLL_S = 0.02


class BenchOptions(AsJson, LoadOptions, ServiceOptions):
    """Options for the load and its measurement."""

    duration_s: Duration = duration(30.0, "Load", "--duration")
    """Duration of the measurement, such as 30s or 5m; by default 30s. It is longer if no request was answered by then."""
    warm_up_s: Duration = duration(3.0, "Load", "--warm-up")
    """Duration of the load before the measurement; not counted; by default 3s."""
    rows: int | None = setting(None, "Load", ge=1)
    """Send tensors with this many rows, with the Open Inference Protocol, instead of images."""
    model: str | None = setting(None)
    """Model, if the service has several."""

    @property
    def load(self) -> str:
        """The load in words."""
        return f"{self.rate:g} requests/s" if self.rate else f"{self.clients} clients"


def bench(options: BenchOptions) -> int:
    """Send requests to a running service and show throughput and latency.

    Without --file, requests are generated for the model that the service serves: images if it classifies images, else tensors. A closed
    loop (--clients) measures the maximum throughput. An open loop (--rate) measures latency at a given arrival rate; latency then counts
    from the scheduled arrival time. Every answer is compared with the answer of the service before the load.

    Examples:
        multiworld bench
        multiworld bench --clients 32 --duration 1m
        multiworld bench --rate 200 --json > bench.json
        multiworld bench --rows 8
        multiworld bench --file question.json

    Exit status: 0 requests were answered and none failed, 1 at least one failed or none was answered, 2 invalid usage, 130 interrupted.
    """
    from multiworld_serving.testing.load.clients import run_load
    from multiworld_serving.testing.load.measurement import measure
    from multiworld_serving.testing.load.requests import body_file, served_requests

    if options.rows is not None and options.files:
        raise UserError("--rows and --file are mutually exclusive: tensors are generated from the seed")
    credentials = options.credentials()
    files = [body_file(path) for path in options.files]
    with open_clients(options) as clients:
        url = str(clients[0].base_url).rstrip("/")
        status = read_status(clients, options.model).json()
        requests = served_requests(
            url, files, model=options.model, rows=options.rows, seed=options.seed, credentials=credentials
        )
        title = f"{status['model']} {status['version']}"
    interrupted = False
    print(f"measuring {title} for {options.duration_s:g} s", file=sys.stderr)
    with run_load(
        url,
        requests,
        clients=options.clients,
        rate_hz=options.rate,
        timeout_s=options.timeout_s,
        seed=options.seed,
        credentials=credentials,
    ) as load:
        since_s, busy_s = time.time() + options.warm_up_s, time.process_time()
        try:
            time.sleep(options.warm_up_s + options.duration_s)
            latest_s = time.time() + options.timeout_s
            while time.time() < latest_s and not any(sample.sent_s >= since_s for sample in load.samples):
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            interrupted = True
        until_s, busy_s = time.time(), time.process_time() - busy_s
    since_s = min(since_s, until_s)
    cores = busy_s / max(1e-9, until_s - since_s + options.warm_up_s)
    found = measure(load, since_s, until_s, rows_per_request=options.rows or 1)
    if options.as_json:
        facts = {"service": title, "load": options.load, "client_cores": round(cores, 2), **found}
        print(json.dumps(facts, indent=1))
    else:
        _show(found, f"{title}, {options.load}, {requests[0].path}", cores)
    return 130 if interrupted else 1 if found["failed"] or not found["answered"] else 0


def _show(found: dict[str, Any], title: str, busy: float) -> None:
    columns = {"answers/s": found["answered_per_s"], "rows/s": found["rows_per_s"], **found["latency_ms"]}
    print(title, table([*columns], [[f"{number:.1f}" for number in columns.values()]], numbers=columns), sep="\n")
    print("latency in ms")
    print(
        f"{found['requests']} requests in {found['seconds']:.1f} s: {found['answered']} answered, "
        f"{found['refused']} refused with 429, {found['failed']} failed"
    )
    for error, times in found["errors"].items():
        print(f"{times} times: {error}")
    if found["unsent"]:
        print(f"{found['unsent']} requests were not sent: too many requests were in flight")
    if busy > _CLIENT_BOUND:
        print(f"the clients used {busy:.2f} cores and may have limited the throughput")
