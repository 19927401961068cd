"""The injections of a recording, as the source of what happens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from simulation.injections import Recording

if TYPE_CHECKING:
    from simulation.simulator import Simulator


class Playback:
    """Everything at the time at which it is recorded."""

    def __init__(self, simulator: Simulator, recording: Recording) -> None:
        self._simulator = simulator
        self._recording = recording

    def begin(self) -> None:
        """Put everything into the agenda."""
        for injection in self._recording.injections:
            self._simulator.agenda.at(injection.at_s, partial(self._simulator.inject, injection))

    def request_closed(self) -> None:
        """The clients of a closed loop have been recorded too: nothing to do."""
