"""Membership decisions of the coordinator of an elastic world: events in, actions out."""

import pytest

from multiworld.elastic.agent import suspect_of
from multiworld.elastic.protocol.coordinator import MAX_FAILED_VIEWS, Action, Coordinator, Persist, SendTo
from multiworld.elastic.protocol.messages import (
    Evicted,
    MemberInfo,
    Message,
    MessageError,
    NewMembersWait,
    NextViewRequest,
    View,
    ViewInvalidated,
    decode,
)
from multiworld.errors import BrokenWorldException, Cause


def infos(*names: str) -> tuple[MemberInfo, ...]:
    return tuple(one(name) for name in names)


def one(name: str) -> MemberInfo:
    return MemberInfo(name, "host", 1)


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


def boundary(coordinator: Coordinator) -> NextViewRequest:
    return NextViewRequest(coordinator.view.number, True, 0)


def test_first_view_forms_with_enough_members_and_is_persisted_before_it_is_sent() -> None:
    coordinator = Coordinator(initial_members=2)
    assert coordinator.on_join(one("a"), 0.0) == []
    actions = coordinator.on_join(one("b"), 0.0)
    view = View(1, infos("a", "b"))
    assert actions == [Persist(view), SendTo("a", view), SendTo("b", view)]


def test_others_are_told_of_a_lost_member_and_form_the_next_view_when_all_have_asked() -> None:
    coordinator = begun("a", "b", "c")
    actions = coordinator.on_lost("a", 1.0)
    assert actions == [SendTo("b", ViewInvalidated(1)), SendTo("c", ViewInvalidated(1))]
    assert coordinator.on_message("b", broken(coordinator, committed=4), 1.1) == []
    actions = coordinator.on_message("c", broken(coordinator, committed=5), 1.2)
    assert messages_to(actions, "b") == [View(2, infos("b", "c"), 5)], (
        "who is behind learns how many rounds are committed"
    )


def test_member_that_does_not_ask_in_time_is_evicted_and_the_others_continue() -> None:
    coordinator = begun("a", "b", "c", regroup_timeout_s=10.0)
    coordinator.on_message("a", broken(coordinator), 1.0)
    coordinator.on_message("c", broken(coordinator), 2.0)
    assert coordinator.deadline_s == 11.0
    assert coordinator.on_tick(10.9) == []
    actions = coordinator.on_tick(11.0)
    assert isinstance(messages_to(actions, "b")[0], Evicted)
    assert coordinator.view.ids() == ("a", "c")


def test_newcomer_waits_for_a_boundary_and_is_not_admitted_after_a_failure() -> None:
    coordinator = begun("a", "b")
    assert coordinator.on_join(one("n"), 1.0) == [SendTo("a", NewMembersWait()), SendTo("b", NewMembersWait())]
    coordinator.on_message("a", boundary(coordinator), 1.0)
    actions = coordinator.on_message("b", broken(coordinator), 1.0)
    assert coordinator.view.ids() == ("a", "b"), "one had an operation in flight"
    assert messages_to(actions, "a") == [coordinator.view, NewMembersWait()], "the next boundary can admit it"
    coordinator.on_message("a", boundary(coordinator), 2.0)
    actions = coordinator.on_message("b", boundary(coordinator), 2.0)
    assert coordinator.view.ids() == ("a", "b", "n")
    assert messages_to(actions, "n") == [coordinator.view]


def test_member_that_does_not_ask_at_a_boundary_is_evicted_and_the_newcomer_admitted() -> None:
    coordinator = begun("a", "b", regroup_timeout_s=10.0)
    coordinator.on_join(one("n"), 1.0)
    coordinator.on_message("a", boundary(coordinator), 2.0)
    assert coordinator.deadline_s == 12.0
    coordinator.on_tick(12.0)
    assert coordinator.view.ids() == ("a", "n")


def test_messages_about_an_older_view_are_ignored() -> None:
    coordinator = begun("a", "b")
    old = broken(coordinator)
    coordinator.on_message("a", old, 1.0)
    coordinator.on_message("b", old, 1.0)
    assert coordinator.view.number == 2
    assert coordinator.on_message("a", old, 1.1) == []
    assert coordinator.on_message("b", old, 1.1) == []
    assert coordinator.view.number == 2


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


def test_members_rejoin_after_a_restart_and_missing_ones_are_evicted() -> None:
    view = View(7, infos("a", "b", "c"), 3)
    coordinator = Coordinator(initial_members=3, regroup_timeout_s=10.0, view=view, now_s=100.0)
    assert coordinator.may_resume("a")
    assert not coordinator.may_resume("stranger")
    assert messages_to(coordinator.on_join(one("a"), 101.0), "a") == [view], "it may have missed the message"
    coordinator.on_join(one("n"), 101.0)
    assert messages_to(coordinator.on_join(one("b"), 101.0), "b") == [view, NewMembersWait()]
    assert coordinator.on_message("a", broken(coordinator), 102.0) == []
    assert coordinator.on_message("b", broken(coordinator), 102.0) == [], "c may still return"
    coordinator.on_tick(110.0)
    assert (coordinator.view.number, coordinator.view.ids()) == (8, ("a", "b"))
    assert not coordinator.may_resume("c")


def test_world_restarts_when_all_have_left_and_view_numbers_continue() -> None:
    coordinator = begun("a", "b")
    coordinator.on_lost("a", 1.0)
    coordinator.on_lost("b", 1.0)
    assert coordinator.on_join(one("c"), 2.0) == []
    coordinator.on_join(one("d"), 2.0)
    assert (coordinator.view.number, coordinator.view.ids()) == (2, ("c", "d"))


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
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"kind": "Nonsense"}',
        b'{"kind": "ViewInvalidated"}',
        b'{"kind": "ViewInvalidated", "view_number": "3"}',
        b'{"kind": "View", "number": 1, "members": [{"id": "a", "host": "h", "port": 0}], "committed": 0}',
        b'{"kind": "View", "number": 1, "members": [{"id": "a b", "host": "h", "port": 1}], "committed": 0}',
        b'{"kind": "Join", "world": "w", "member": {"id": "a", "host": "h", "port": "1"}, "resume": false}',
        b'{"kind": "Join", "world": "w", "member": [], "resume": false}',
    ],
)
def test_malformed_message_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(data)


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="initial_members must be at least 1"):
        Coordinator(initial_members=0)
