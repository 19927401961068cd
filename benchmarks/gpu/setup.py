"""What a step knows, and where it writes what it has found."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUNNING = "running"


class NeedsGpuError(Exception):
    """The rest of the step needs a GPU, or something else that this machine does not have."""


@dataclass
class Setup:
    """The arguments of a step, and its results, which are in its file from the moment at which they are known.

    Attributes:
        device: "cuda:0", or "cpu" in place of it.
        peers_python: interpreter of the environment that has mosec and LitServe.
        file: JSON with the results.
        folder: for files that later steps use.
        start_s: longest wait for a process that starts, or for a response.
    """

    device: str
    peers_python: str
    file: Path
    folder: Path
    start_s: float = 60.0
    found: dict[str, Any] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def small(self) -> bool:
        """A rehearsal takes seconds instead of minutes: a small model, few sizes, short loads."""
        return not self.on_gpu

    def add(self, name: str, value: Any) -> None:
        """Add a result and write the file."""
        self.found[name] = value
        self.write(RUNNING)
        print(f"{name}: {value}", flush=True)

    def write(self, status: str, reason: str = "") -> None:
        document = {
            "status": status,
            "reason": reason,
            "seconds": round(time.monotonic() - self.started_s, 1),
            "device": self.device,
            "found": self.found,
        }
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(document, indent=1, default=str), encoding="utf-8")
        new.replace(self.file)

    def require_gpu(self, what: str) -> None:
        """Raise NeedsGpuError without a GPU."""
        if not self.on_gpu:
            raise NeedsGpuError(what)

    @property
    def cores(self) -> int:
        return len(os.sched_getaffinity(0))
