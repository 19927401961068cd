"""Membership decisions of the coordinator of an elastic world: events in, actions out."""

import pytest

from multiworld.elastic.agent import accused_by
from multiworld.elastic.protocol.coordinator import ATTEMPTS, Action, Coordinator, Drop, Remember, Tell
from multiworld.elastic.protocol.messages import (
    Ask,
    Evicted,
    Leave,
    MemberInfo,
    Message,
    MessageError,
    Unchanged,
    View,
    Void,
    decode,
    encode,
)
from multiworld.errors import BrokenWorldException, Cause


def seated(*names: str) -> tuple[MemberInfo, ...]:
    return tuple(one(name) for name in names)


def one(name: str) -> MemberInfo:
    return MemberInfo(name, "host", 1)


def begun(*names: str, patience_s: float = 10.0) -> Coordinator:
    """A coordinator whose first view has these members."""
    coordinator = Coordinator(first_size=len(names), patience_s=patience_s)
    for member in seated(*names):
        coordinator.join(member, 0.0)
    assert coordinator.view.ids() == names
    return coordinator


def told(actions: list[Action], name: str) -> list[Message]:
    return [action.message for action in actions if isinstance(action, Tell) and action.member_id == name]


def broken(coordinator: Coordinator, closed: int = 0, accused: str = "") -> Ask:
    return Ask(coordinator.view.epoch, False, closed, coordinator.view.boundaries, accused)


def boundary(coordinator: Coordinator) -> Ask:
    return Ask(coordinator.view.epoch, True, 0, coordinator.view.boundaries)


def test_first_view_forms_with_enough_members_and_is_persisted_before_it_is_sent() -> None:
    coordinator = Coordinator(first_size=2)
    assert coordinator.join(one("a"), 0.0) == []
    actions = coordinator.join(one("b"), 0.0)
    view = View(1, seated("a", "b"), 0, 1)
    assert actions == [Remember(view), Tell("a", view), Tell("b", view)]


def test_others_are_told_of_a_lost_member_and_form_the_next_view_when_all_have_asked() -> None:
    coordinator = begun("a", "b", "c")
    actions = coordinator.lost("a", 1.0)
    assert actions == [Tell("b", Void(1)), Tell("c", Void(1))]
    assert coordinator.heard("b", broken(coordinator, closed=4), 1.1) == []
    actions = coordinator.heard("c", broken(coordinator, closed=5), 1.2)
    assert told(actions, "b") == [View(2, seated("b", "c"), 5, 1)], (
        "a member that is behind gets the number of closed rounds"
    )


def test_member_that_does_not_ask_in_time_is_evicted_and_the_others_continue() -> None:
    coordinator = begun("a", "b", "c", patience_s=10.0)
    coordinator.heard("a", broken(coordinator), 1.0)
    coordinator.heard("c", broken(coordinator), 2.0)
    assert coordinator.due_s == 11.0
    assert coordinator.tick(10.9) == []
    actions = coordinator.tick(11.0)
    assert isinstance(told(actions, "b")[0], Evicted)
    assert Drop("b") in actions
    assert coordinator.view.ids() == ("a", "c")


def test_newcomer_waits_for_a_boundary_and_is_not_admitted_after_a_failure() -> None:
    coordinator = begun("a", "b")
    assert coordinator.join(one("n"), 1.0) == []
    coordinator.heard("a", boundary(coordinator), 1.0)
    coordinator.heard("b", broken(coordinator), 1.0)
    assert coordinator.view.ids() == ("a", "b"), "one had an operation in flight"
    coordinator.heard("a", boundary(coordinator), 2.0)
    actions = coordinator.heard("b", boundary(coordinator), 2.0)
    assert coordinator.view.ids() == ("a", "b", "n")
    assert told(actions, "n") == [coordinator.view]


def test_view_continues_when_all_are_at_a_boundary_and_no_newcomer_waits() -> None:
    coordinator = begun("a", "b")
    coordinator.heard("a", boundary(coordinator), 1.0)
    actions = coordinator.heard("b", boundary(coordinator), 1.0)
    assert told(actions, "a") == told(actions, "b") == [Unchanged(1, 2)]
    assert Remember(coordinator.view) in actions
    late = coordinator.heard("a", Ask(1, True, 0, 1), 1.5)
    assert late == [Tell("a", Unchanged(1, 2))], "a lost message is sent again"


def test_messages_about_an_older_view_are_ignored() -> None:
    coordinator = begun("a", "b")
    old = broken(coordinator)
    coordinator.heard("a", old, 1.0)
    coordinator.heard("b", old, 1.0)
    assert coordinator.view.epoch == 2
    assert coordinator.heard("a", old, 1.1) == []
    assert coordinator.heard("b", old, 1.1) == []
    assert coordinator.view.epoch == 2


def test_one_of_two_unreachable_members_is_evicted_after_some_attempts() -> None:
    coordinator = begun("a", "b", "c")
    for _ in range(ATTEMPTS):
        assert coordinator.view.ids() == ("a", "b", "c")
        coordinator.heard("a", broken(coordinator, accused="b"), 1.0)
        coordinator.heard("b", broken(coordinator, accused="a"), 1.0)
        actions = coordinator.heard("c", broken(coordinator, accused="b"), 1.0)
    assert coordinator.view.ids() == ("a", "c"), "two suspected b, one a"
    assert isinstance(told(actions, "b")[0], Evicted)


def test_newest_member_is_evicted_when_no_suspect_is_known_and_progress_resets_the_attempts() -> None:
    coordinator = begun("a", "b")
    for attempt in range(ATTEMPTS - 1):
        for name in ("a", "b"):
            coordinator.heard(name, broken(coordinator, closed=1), float(attempt))
    for name in ("a", "b"):
        coordinator.heard(name, broken(coordinator, closed=2), 9.0)
    assert coordinator.view.ids() == ("a", "b"), "a round was closed in between"
    for _ in range(ATTEMPTS - 1):
        for name in ("a", "b"):
            coordinator.heard(name, broken(coordinator, closed=2), 9.0)
    assert coordinator.view.ids() == ("a",)


def test_members_rejoin_after_a_restart_and_missing_ones_are_evicted() -> None:
    view = View(7, seated("a", "b", "c"), 3, 2)
    coordinator = Coordinator(first_size=3, patience_s=10.0, view=view, now_s=100.0)
    assert coordinator.may_resume("a")
    assert not coordinator.may_resume("stranger")
    assert told(coordinator.join(one("a"), 101.0), "a") == [view], "it may have missed the message"
    coordinator.join(one("b"), 101.0)
    assert coordinator.heard("a", broken(coordinator), 102.0) == []
    assert coordinator.heard("b", broken(coordinator), 102.0) == [], "c may still return"
    coordinator.tick(110.0)
    assert (coordinator.view.epoch, coordinator.view.ids()) == (8, ("a", "b"))
    assert not coordinator.may_resume("c")


def test_world_restarts_when_all_have_left_and_view_numbers_continue() -> None:
    coordinator = begun("a", "b")
    coordinator.heard("a", Leave(), 1.0)
    coordinator.lost("b", 1.0)
    assert coordinator.join(one("c"), 2.0) == []
    coordinator.join(one("d"), 2.0)
    assert (coordinator.view.epoch, coordinator.view.ids()) == (2, ("c", "d"))


@pytest.mark.parametrize(
    ("cause", "rank", "accused"),
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
def test_member_is_suspected_only_when_the_failure_names_it(cause: Cause, rank: int, accused: str) -> None:
    assert accused_by("b", View(1, seated("a", "b", "c")), BrokenWorldException("w", cause, rank)) == accused


@pytest.mark.parametrize(
    "message",
    [Ask(3, True, 2, 1, "m"), Leave(), View(3, seated("a", "b"), 2, 1), Void(3), Unchanged(3, 2), Evicted("why")],
)
def test_messages_survive_encoding(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [b"[" * 60_000, b"", b"{}", b"[]", b"\xff", b'{"kind": "Nonsense"}', b'{"kind": "Void"}', b'{"kind": "Void", "epoch": "3"}',
     b'{"kind": "View", "epoch": 1, "members": [{"id": "a", "host": "h", "port": 0}], "closed": 0, "boundaries": 0}',
     b'{"kind": "View", "epoch": 1, "members": [{"id": "a b", "host": "h", "port": 1}], "closed": 0, "boundaries": 0}'],
)  # fmt: skip
def test_malformed_message_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(data)


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="first_size must be at least 1"):
        Coordinator(first_size=0)
