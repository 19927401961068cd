"""Membership decisions of the coordinator of an elastic world: events in, actions out."""

import pytest

from multiworld.elastic.agent import suspect_of
from multiworld.elastic.protocol.coordinator import MAX_FAILED_VIEWS, Action, Coordinator, SendTo
from multiworld.elastic.protocol.messages import (
    Evicted,
    MemberInfo,
    Message,
    MessageError,
    NextViewRequest,
    View,
    decode,
)
from multiworld.errors import BrokenWorldException, Cause


def infos(*names: str) -> tuple[MemberInfo, ...]:
    return tuple(MemberInfo(name, "host", 1) for name in names)


def begun(*names: str, regroup_timeout_s: float = 10.0) -> Coordinator:
    """A coordinator whose first view has these members."""
    coordinator = Coordinator(initial_members=len(names), regroup_timeout_s=regroup_timeout_s)
    for member in infos(*names):
        coordinator.on_join(member, 0.0)
    assert coordinator.view.ids() == names
    return coordinator


def messages_to(actions: list[Action], name: str) -> list[Message]:
    return [action.message for action in actions if isinstance(action, SendTo) and action.member_id == name]


def broken(coordinator: Coordinator, committed: int = 0, suspect: str = "") -> NextViewRequest:
    return NextViewRequest(coordinator.view.number, False, committed, suspect)


def test_one_of_two_unreachable_members_is_evicted_after_some_attempts() -> None:
    coordinator = begun("a", "b", "c")
    for _ in range(MAX_FAILED_VIEWS):
        assert coordinator.view.ids() == ("a", "b", "c")
        coordinator.on_message("a", broken(coordinator, suspect="b"), 1.0)
        coordinator.on_message("b", broken(coordinator, suspect="a"), 1.0)
        actions = coordinator.on_message("c", broken(coordinator, suspect="b"), 1.0)
    assert coordinator.view.ids() == ("a", "c"), "two suspect b, one a"
    assert isinstance(messages_to(actions, "b")[0], Evicted)


def test_newest_member_is_evicted_when_no_suspect_is_known_and_progress_resets_the_attempts() -> None:
    coordinator = begun("a", "b")
    for attempt in range(MAX_FAILED_VIEWS - 1):
        for name in ("a", "b"):
            coordinator.on_message(name, broken(coordinator, committed=1), float(attempt))
    for name in ("a", "b"):
        coordinator.on_message(name, broken(coordinator, committed=2), 9.0)
    assert coordinator.view.ids() == ("a", "b"), "a round was committed meanwhile"
    for _ in range(MAX_FAILED_VIEWS - 1):
        for name in ("a", "b"):
            coordinator.on_message(name, broken(coordinator, committed=2), 9.0)
    assert coordinator.view.ids() == ("a",)


@pytest.mark.parametrize(
    ("cause", "rank", "suspect"),
    [
        (Cause.EXIT, 0, "a"),
        (Cause.HANG, 2, "c"),
        (Cause.TRANSPORT, 0, "a"),
        (Cause.TRANSPORT, -1, ""),
        (Cause.TRANSPORT, 3, ""),
        (Cause.TRANSPORT, 1, ""),
        (Cause.LOCAL, 0, "a"),
        (Cause.LOCAL, 1, ""),
        (Cause.LOCAL, -1, ""),
        *((cause, 0, "") for cause in (Cause.LEFT, Cause.TIMEOUT, Cause.ERROR, Cause.ABORTED)),
    ],
)
def test_member_is_suspected_only_when_the_failure_names_it(cause: Cause, rank: int, suspect: str) -> None:
    assert suspect_of("b", View(1, infos("a", "b", "c")), BrokenWorldException("w", cause, rank)) == suspect


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 60_000,
        b'{"kind": "Nonsense"}',
        b'{"kind": "ViewInvalidated", "view_number": "3"}',
        b'{"kind": "View", "number": 1, "members": [{"id": "a", "host": "h", "port": 0}], "committed": 0}',
        b'{"kind": "View", "number": 1, "members": [{"id": "a b", "host": "h", "port": 1}], "committed": 0}',
        b'{"kind": "Join", "world": "w", "member": {"id": "a", "host": "h", "port": "1"}, "resume": false}',
        b'{"kind": "Join", "world": "a b", "member": {"id": "a", "host": "h", "port": 1}, "resume": false}',
    ],
)
def test_malformed_message_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(data)
