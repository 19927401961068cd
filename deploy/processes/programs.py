"""The settings of each process of a service, as a JSON file that the process reads and validates, for all launchers.

The file is in memory: it has no name in a folder, only processes of this user can read it, and it disappears with the process that made it.
Neither the command line nor the environment has a secret.
"""

import contextlib
import os

from pydantic import SecretStr

from multiworld_serving.common.config import Settings
from multiworld_serving.common.config.settings import to_json
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.settings import FrontendSettings, ServeSettings
from multiworld_serving.workers.settings import WorkerSettings

_STOP_MARGIN_S = 5.0
"""Seconds from the end of the drain timeout to SIGKILL."""
_BLOCKED_HEARTBEATS = 3
_BLOCKED_S = 5.0
"""A leader or frontend that gives no sign of life for this long is killed; at least `_BLOCKED_HEARTBEATS` heartbeat timeouts."""
_WORKER_BLOCKED_S = 10.0

Values = dict[str, object]
"""Settings by name."""


def leader_values(settings: ServeSettings, index: int) -> Values:
    """The settings of a leader, without its socket."""
    return {
        **_shared(settings, LeaderSettings),
        "name": f"leader-{index}",
        "report_capacity": settings.autoscale is not None,
        "exit_with_parent": True,
        "metrics_port": None,
        "metrics_host": None,
    }


def frontend_values(settings: ServeSettings, index: int) -> Values:
    """The settings of a frontend, without its sockets and leaders."""
    return {**_shared(settings, FrontendSettings), "name": f"frontend-{index}", "exit_with_parent": True}


def worker_values(settings: ServeSettings) -> Values:
    """The settings of all workers, without name, device, threads and leaders."""
    assert settings.local_token is not None, "the token must be set before workers start"
    shared = {name for name in WorkerSettings.model_fields if name in ServeSettings.model_fields}
    # These are settings of other processes, or of the supervisor.
    others = {"advertise_host", "device", "exit_with_parent", "metrics_host", "metrics_port", "token", "token_file"}
    return {
        **{name: getattr(settings, name) for name in shared - others},
        "token": settings.local_token,
        "edge_token": SecretStr(settings.secrets[0].decode()) if settings.secrets else None,
        "exit_with_parent": True,
    }


def stop_timeout_s(settings: ServeSettings) -> float:
    """Seconds from SIGTERM to SIGKILL of a leader or frontend."""
    return settings.drain_timeout_s + _STOP_MARGIN_S


def blocked_timeout_s(settings: ServeSettings) -> float:
    """Seconds without a sign of life after which a leader or frontend is killed."""
    return max(_BLOCKED_S, _BLOCKED_HEARTBEATS * settings.heartbeat_timeout_s)


def worker_blocked_timeout_s(settings: ServeSettings) -> float:
    """The same of a worker. A thread of it gives the signs of life, so only a frozen process is silent."""
    return _WORKER_BLOCKED_S


def settings_file(stack: contextlib.ExitStack | contextlib.AsyncExitStack, values: Values) -> str:
    """Path of a JSON file in memory with the settings of a program, secrets included. `stack` removes it."""
    return memory_file(stack, "settings", to_json(values))


def memory_file(stack: contextlib.ExitStack | contextlib.AsyncExitStack, name: str, text: str) -> str:
    """Path of a file in memory with this text; it disappears with this process, or when `stack` is closed."""
    file = stack.enter_context(os.fdopen(os.memfd_create(name), "w", encoding="utf-8"))
    file.write(text)
    file.flush()
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _shared(settings: ServeSettings, cls: type[Settings]) -> Values:
    values = {name: getattr(settings, name) for name in cls.model_fields if hasattr(settings, name)}
    if values["token_file"] is not None:
        values["token"] = None  # read from the file
    return values
