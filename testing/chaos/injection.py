"""One injected fault and its effects."""

from dataclasses import dataclass


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
