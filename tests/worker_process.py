"""A service without local workers, and one external worker with a metrics port, as in a container."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multiworld_serving.testing.local_service import LocalService
from tests.nursery import start_program
from tests.services import service_for_workers


@contextmanager
def metered_service(folder: Path) -> Iterator[tuple[LocalService, str]]:
    """A ready service with one stage on one such worker while the block lasts; gives the worker's metrics URL."""
    token = folder / "token"
    token.write_text("a-secret-of-these-tests")
    with (
        service_for_workers(token) as service,
        _worker(service.join_address, token) as metrics_url,
    ):
        service.wait_until_complete(60.0)
        yield service, metrics_url


@contextmanager
def _worker(leader: str, token: Path) -> Iterator[str]:
    options = {"leader": leader, "token-file": token, "metrics-port": 0, "threads": 1, "log-format": "json"}
    process = start_program(
        ["worker", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]
    )
    assert process.stderr is not None
    url = ""
    drain = threading.Thread(target=process.stderr.read)
    try:
        for text in process.stderr:
            line = json.loads(text)
            if line["message"].startswith("listening ") and (url := line.get("metrics", "")):
                break
        drain.start()
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            if drain.ident is not None:
                drain.join()
            process.stderr.close()
