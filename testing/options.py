"""Options for loads and for campaigns of faults. The verbs `bench` and `chaos` take them, so this module imports little."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from multiworld_serving.common.config.settings import Options, setting

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def seconds(text: str | float) -> float:
    """Parse a duration such as "25ms", "9s" or "1.5h" into seconds; a number without unit is in seconds. Raises ValueError."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", str(text).strip())
    if match is None or (match[2] or "s") not in _UNITS:
        raise ValueError("not a duration")
    return float(match[1]) * _UNITS[match[2] or "s"]


Duration = Annotated[float, BeforeValidator(seconds)]


def duration(default: float | None, panel: str, name: str) -> Any:
    """Declare an option of type `Duration`."""
    allowed = f"a number with a unit of {', '.join(_UNITS)}, such as 25ms or 1.5h"
    return setting(default, panel, names=(name,), metavar="TIME", allowed=allowed)


class LoadOptions(Options):
    """Options for the load."""

    clients: int = setting(8, "Load", ge=1)
    """Closed loop: number of clients, each with one request at a time."""
    rate: float | None = setting(None, "Load", metavar="HZ", ge=0.01)
    """Open loop instead of --clients: requests per second at random times (Poisson), independent of the responses."""
    seed: int = setting(0, "Load")
    """Seed of the requests and of the arrival times of an open loop, and of faults and their targets."""
    files: tuple[Path, ...] = setting((), "Load", names=("--file",), metavar="FILE")
    """Body of a request to /predict, may be repeated; by default requests are generated for the model."""


class Plan(LoadOptions):
    """Options of a campaign of faults."""

    heartbeat_timeout_s: float = setting(1.0, "The service", ge=0.01)
    """Heartbeat timeout of the service."""
    recovery_grace_s: float = setting(15.0, "The service", ge=0)
    """How long the service keeps requests for a stage without replicas, in seconds."""
    rounds: int = setting(1, "Faults", ge=1)
    """Number of injections of each fault."""
    duration_s: Duration | None = duration(None, "Faults", "--duration")
    """Duration of the campaign, such as 30m, instead of --rounds."""
    settle_s: Duration = duration(2.0, "Faults", "--settle")
    """Pause between recovery and the next fault. Faults never overlap. By default 2s."""
