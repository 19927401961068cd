"""`multiworld rolling-restart`, `load-version` and `unload`: operations on a running service through its admin port."""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multiworld_serving.cli.options import AsJson, value
from multiworld_serving.cli.service import (
    Access,
    AdminPort,
    ServiceError,
    ServiceTimeoutError,
    answer_errors,
    http_errors,
    send_request,
    use_other_port,
)

if TYPE_CHECKING:
    import httpx

RESTART_EPILOG = """
[bold]Examples[/bold]

multiworld rolling-restart

multiworld rolling-restart --operations-url http://10.0.0.1:8002 --token-file token

[bold]Exit status[/bold]: 0 all workers were restarted, 1 at least one was not, 2 invalid usage.
"""
LOAD_EPILOG = """
[bold]Examples[/bold]

multiworld load-version fine-tuned/epoch-12.safetensors

multiworld load-version

[bold]Exit status[/bold]: 0 the new version serves, 1 failure and nothing has changed, 2 invalid usage.
"""
UNLOAD_EPILOG = """
[bold]Exit status[/bold]: 0 the model is out of service, 1 failure and nothing has changed, 2 invalid usage.
"""

Weights = Annotated[
    str | None,
    typer.Argument(
        metavar="WEIGHTS",
        help="A bundle or a file of weights below the service's --weights-dir, a published name, or random:SEED; default: reload the "
        "weights that the service was started with.",
        show_default=False,
    ),
]
_monotonic = time.monotonic
_FOLLOW_S = 1.0
_STATUS_S = 3.0
"""Timeout of a question about the progress."""
_MAX_NAMES = 8
"""Above this number of workers, only their number is shown."""
OperationTimeoutS = Annotated[float, value("SECONDS", "Timeout of the operation, in seconds.", min=1.0)]


def rolling_restart(
    *, admin: AdminPort, as_json: AsJson = False, timeout_s: OperationTimeoutS = 3600.0, access: Access
) -> int:
    """Restart all workers one at a time while the others serve.

    Each worker finishes its batches and exits; whatever started it (the service, Docker, Kubernetes) starts it again; and it
    must be serving before the next worker is restarted. No request fails. Ctrl-C, and a step that ends after --timeout-s, stop after
    the current worker. If the service has admin keys (--admin-keys-file), give one with --api-key-file. With --json, prints one line
    per step.
    """
    steps = _Steps(as_json=as_json)
    with (
        admin.open_client(access, timeout_s) as client,
        answer_errors(admin.operations_url, "the admin port of a multiworld service"),
        _following(steps.waits_for, timeout_s),
        _saying_what_was_done(steps.done),
    ):
        began_s = _monotonic()
        for line in _restart_lines(client):
            steps.add(line)
            if steps.state not in ("done", "failed") and _monotonic() - began_s > timeout_s:
                raise ServiceError(f"not done within {timeout_s:g} s: {steps.done()}; increase --timeout-s")
    if steps.state != "done":
        raise ServiceError(str(steps.last.get("error", "the service stopped before all workers were restarted")))
    return 0


def _restart_lines(client: "httpx.Client") -> Iterator[str]:
    """The lines of the answer. Raises ServiceError."""
    url, path = str(client.base_url), "/admin/rolling-restart"
    with http_errors(url, timeout_s=client.timeout.read), client.stream("POST", path, json={}) as response:
        if not response.is_success:
            response.read()
        if not use_other_port(client, response):
            yield from response.raise_for_status().iter_lines()
            return
    yield from _restart_lines(client)


class _Steps:
    """The steps of a rolling restart, shown as they happen."""

    def __init__(self, *, as_json: bool) -> None:
        self.last: dict[str, Any] = {}
        self._as_json = as_json
        self._restarted = 0

    @property
    def state(self) -> object:
        """State of the last step; None before the first one."""
        return self.last.get("state")

    def add(self, line: str) -> None:
        """Show a step. Raises ValueError or KeyError if it has another form."""
        step = self.last = json.loads(line)
        self._restarted += step["state"] == "restarted"
        if self._as_json:
            print(line, flush=True)
        elif step["state"] == "restarted":
            where = f"{step['number']}/{step['total']} {step['worker']} ({step['slot']})"
            print(f"{where}: stopped after {step['left_s']:.1f} s, serving after {step['back_s']:.1f} s", flush=True)
        elif step["state"] == "done":
            print(f"{step['restarted']} workers restarted", flush=True)

    def waits_for(self) -> str:
        """What the restart waits for now."""
        if self.state != "restarting":
            return "waiting until every slot has a ready replica"
        step = self.last
        return f"{step['number']}/{step['total']} {step['worker']} ({step['slot']}): it finishes its batches, ends, and starts again"

    def done(self) -> str:
        """What has happened so far."""
        total = self.last.get("total", "?")
        current = f"; the service finishes {self.last['worker']} and stops" if self.state == "restarting" else ""
        return f"{self._restarted} of {total} workers restarted{current}"


def load_version(
    *,
    weights: Weights = None,
    admin: AdminPort,
    as_json: AsJson = False,
    timeout_s: OperationTimeoutS = 3600.0,
    access: Access,
) -> int:
    """Switch a running service to other weights of its model, without a failed request.

    Each worker in turn loads the new weights next to the current ones and must pass a self-test. Then new requests use the new
    weights; requests in flight finish with the old ones. If any step fails, nothing changes. After `unload`, this puts the model
    back into service.
    """
    parameters = {} if weights is None else {"weights": weights}
    what = f"loading {weights or 'the configured weights'}"
    with (
        admin.open_client(access, timeout_s) as client,
        admin.open_client(access, _STATUS_S) as observer,
        _following(lambda: f"{what}: {_load_phase(observer)}", timeout_s),
        _saying_what_was_done(lambda: _load_done(observer)),
    ):
        answer = _ask(client, "load", parameters)
    if as_json:
        print(json.dumps(answer))
    else:
        print(f"{answer['name']} answers with {answer['weights']}, version {answer['version']}")
    return 0


def unload(*, admin: AdminPort, timeout_s: OperationTimeoutS = 3600.0, access: Access) -> int:
    """Take the model out of service: new requests get status 503, requests in flight are answered.

    The workers keep running. `load-version` puts the model back into service.
    """
    with (
        admin.open_client(access, timeout_s) as client,
        _following(lambda: "waiting for the answers of requests in flight", timeout_s),
    ):
        _ask(client, "unload", {})
    print("the model is out of service")
    return 0


def _ask(client: "httpx.Client", verb: str, parameters: dict[str, str]) -> dict[str, Any]:
    with answer_errors(client.base_url, "the admin port of a multiworld service"):
        (model, *_) = send_request(client, "POST", "/v2/repository/index", json={}).json()
        path = f"/v2/repository/models/{model['name']}/{verb}"
        found: dict[str, Any] = send_request(client, "POST", path, json={"parameters": parameters}).json()
        return found


def _status(observer: "httpx.Client") -> dict[str, Any] | None:
    """The status of the service; None if it cannot be had, for example without a key that permits it."""
    try:
        found: dict[str, Any] = send_request(observer, "GET", "/status", headers={"Accept": "application/json"}).json()
    except (ServiceError, ValueError):
        return None
    return found


def _load_phase(observer: "httpx.Client") -> str:
    status = _status(observer)
    if status is None:
        return "waiting for the service"
    if (rollout := status["rollout"]) is None:
        return "waiting for a leader"
    leader = rollout["leader"]
    match rollout["phase"]:
        case "reading":
            return f"{leader} reads the weights"
        case "ending":
            return f"{leader} waits for requests with the former version; {status['version']} serves new ones"
    if rollout["worker"] is None:
        return f"{leader} waits until every stage has a ready worker; {_passed(rollout)}"
    return f"{leader} waits for {rollout['worker']} ({rollout['world']}) to load its stage; {_passed(rollout)}"


def _passed(rollout: dict[str, Any]) -> str:
    passed = rollout["passed"]
    names = f" ({', '.join(passed)})" if 0 < len(passed) <= _MAX_NAMES else ""
    return f"{len(passed)} of {rollout['workers']} workers{names} have passed the self-test"


def _load_done(observer: "httpx.Client") -> str:
    """What a load that is given up has done, and what serves."""
    status = _status(observer)
    if status is None:
        return "the service cancels the load; its status is unknown"
    rollout, serves = status.get("rollout"), f"{status.get('model')} answers with {status.get('version')}"
    if rollout is not None and rollout["phase"] == "ending":
        return f"the load is complete; {serves}"
    passed = f"{_passed(rollout)}; " if rollout is not None and rollout["phase"] == "loading" else ""
    return f"{passed}the service cancels the load; {serves}"


@contextlib.contextmanager
def _saying_what_was_done(done: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C in the block, print one line that says what was done; a timeout says so, too."""
    try:
        yield
    except ServiceTimeoutError as error:
        raise ServiceError(f"{error}: {done()}") from error
    except KeyboardInterrupt:
        print(f"multiworld: interrupted: {done()}", file=sys.stderr)
        raise


@contextlib.contextmanager
def _following(describe: Callable[[], str], timeout_s: float) -> Iterator[None]:
    """While the block runs, show what it waits for, and for how long, on standard error: live on a terminal, else one line per change.

    Args:
        describe: called on another thread; may take some seconds.
    """
    from multiworld_serving.cli.console import progress_console

    console, ended, began_s = progress_console(), threading.Event(), time.monotonic()
    live = console.status("") if console.is_terminal else None

    def follow() -> None:
        last, changed_s = "", began_s
        while not ended.wait(_FOLLOW_S):
            try:
                text = describe()
            except (KeyError, TypeError, AttributeError):  # the answer of another release
                text = "waiting for the service"
            except Exception:
                if ended.is_set():  # the operation has failed, and the client is closed
                    return
                raise
            if ended.is_set():
                return
            now_s = time.monotonic()
            if text != last:
                changed_s = now_s
                if live is None:
                    print(
                        f"multiworld: {text} ({now_s - began_s:.0f} s of at most {timeout_s:g} s)",
                        file=sys.stderr,
                        flush=True,
                    )
            if live is not None:
                live.update(
                    f"{text} for {now_s - changed_s:.0f} s ({now_s - began_s:.0f} s of at most {timeout_s:g} s)"
                )
            last = text

    thread = threading.Thread(target=follow, name="progress", daemon=True)
    with live or contextlib.nullcontext():
        thread.start()
        try:
            yield
        finally:
            ended.set()
    thread.join(2 * _STATUS_S)
