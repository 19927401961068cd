"""What has happened so far in a campaign, in a file, so that a campaign whose driver was interrupted can continue."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.testing.load.clients import Sample


@dataclass(frozen=True, slots=True)
class Injection:
    """One injected fault and its effects. Times are seconds since the injection, except `at_s` and `ended_s` (`time.time()`).

    Attributes:
        detected_s: until the leader detected the first broken world of a target, or the frontends the lost leader; None if neither.
        recovered_s: until every slot was ready again.
        recovered: whether that happened before the timeout.
        excused: statuses of requests that the fault excuses.
        unexpected: descriptions of effects that the fault does not expect.
        resident_mib, descriptors: of all processes of the service, after the recovery.
    """

    fault: str
    targets: tuple[str, ...]
    at_s: float
    ended_s: float
    causes: tuple[str, ...] = ()
    detected_s: float | None = None
    recovered_s: float = 0.0
    recovered: bool = True
    duplicates: int = 0
    excused: tuple[int, ...] = ()
    unexpected: tuple[str, ...] = ()
    resident_mib: float = 0.0
    descriptors: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A fault, the requests that have ended since the previous one, and how long the campaign has run."""

    seed: int
    elapsed_s: float
    injection: Injection
    samples: Sequence[Sample]


class Journal:
    """The entries of a campaign, one JSON object a line.

    Args:
        path: None keeps nothing.
        seed: of the campaign.
    Raises:
        UserError: the file is the journal of another campaign.
    """

    def __init__(self, path: Path | None, seed: int) -> None:
        self._path = path
        self._seed = seed
        self.entries: list[Entry] = []
        """Those of earlier runs."""
        if path is None or not path.exists():
            return
        whole, _, _ = path.read_bytes().rpartition(b"\n")  # the last line may be cut off
        try:
            self.entries = [msgspec.json.decode(line, type=Entry) for line in whole.splitlines()]
        except msgspec.MsgspecError as error:
            raise UserError(f"{path} is not the journal of a campaign ({error}): remove it") from error
        if any(entry.seed != seed for entry in self.entries):
            raise UserError(f"{path} is the journal of a campaign with another --seed: remove it, or use its seed")
        path.write_bytes(whole + b"\n" * bool(whole))

    @property
    def elapsed_s(self) -> float:
        """How long earlier runs have taken."""
        return self.entries[-1].elapsed_s if self.entries else 0.0

    def append(self, elapsed_s: float, injection: Injection, samples: Sequence[Sample]) -> None:
        """Add an entry."""
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(Entry(self._seed, elapsed_s, injection, samples)) + b"\n")

    def remove(self) -> None:
        """The campaign is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
