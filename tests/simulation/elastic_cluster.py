"""Elastic worlds in virtual time: the product's coordinator, members, rounds and calls, with a network and processes that fail by a seed.

    python -m tests.simulation.elastic_cluster kills 17

replays a schedule and prints its events. Simulated are processes (killed, frozen, continued), connections (delays, partitions), the
worlds of views (they form when all members have joined, and break at each member at another time) and operations (finished when all have
taken part, at each member at another time, or never). All decisions are made by the product's code.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from multiworld.elastic.protocol import coordinator, member_state
from multiworld.elastic.protocol.commit_protocol import (
    AllGather,
    AwaitBoundary,
    AwaitView,
    RunOperations,
    ViewEnded,
    pass_boundary,
    run_round,
)
from multiworld.elastic.protocol.coordinator import Coordinator, Disconnect, Persist, SendTo
from multiworld.elastic.protocol.member_state import (
    CloseView,
    EndBoundary,
    EndMembership,
    FormView,
    MemberState,
    Send,
    ViewReady,
)
from multiworld.elastic.protocol.messages import Evicted, MemberInfo, Message, View, decode, encode
from multiworld.elastic.protocol.rounds import Round

SILENCE_S = 1.2
"""When a silent member counts as lost: heartbeat_timeout_s plus one interval."""
PATIENCE_S = 10.0
FORM_S = 10.0
VIEW_CHANGE_S = 60.0
CALLS = 6
OPERATIONS = 7
IN_FLIGHT = 3
AFTER_A_KILL_S = 1.2
"""A view change after a kill takes some messages, each of which may be slow (`_moment`), and waits for no timeout."""
BOUND_S = 400.0
"""Virtual time by which every member has ended: much more than a few faults can cost."""

Value = tuple[int, frozenset[str]]
"""Result of an operation: number of the view in which it was done, and whose operands are in it."""


@dataclass(frozen=True)
class Scenario:
    """The maximum number of each kind of fault in a schedule."""

    name: str
    members: int = 4
    kills: int = 0
    freezes: int = 0
    cuts: int = 0
    rifts: int = 0
    joins: int = 0
    restarts: int = 0

    @property
    def blames_the_innocent(self) -> bool:
        """Whether a healthy member may be evicted: of two that cannot reach each other one must be."""
        return self.rifts > 0


SCENARIOS = (
    Scenario("quiet"),
    Scenario("kills", kills=3),
    Scenario("all-but-one", members=3, kills=2),
    Scenario("freezes", freezes=3),
    Scenario("cuts", cuts=2),
    Scenario("joins", joins=3),
    Scenario("rendezvous", restarts=2, kills=1),
    Scenario("rifts", members=5, rifts=2),
    Scenario("many", members=8, kills=5, joins=2),
    Scenario("everything", members=6, kills=2, freezes=2, cuts=1, joins=3, restarts=2),
)


@dataclass(eq=False)
class World:
    """The world of one view."""

    view: View
    came: set[str] = field(default_factory=set)
    up: set[str] = field(default_factory=set)
    down: bool = False
    parts: dict[tuple[object, ...], dict[str, Any]] = field(default_factory=dict)
    """Operation → member → operand."""


@dataclass(eq=False)
class Pending:
    """What a member waits for in one view."""

    view_number: int
    done: Callable[[Any], None]
    over: Callable[[], None]


class Member:
    """A process."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.protocol = MemberState(name)
        self.state = "running"
        """running, killed, done, or the reason of its failure."""
        self.harmed = False
        self.started = False
        self.frozen = False
        self.cut = False
        self.held: list[Callable[[], None]] = []
        self.linked = True
        self.outcomes: dict[int, tuple[bool, dict[int, Value]]] = {}
        self.pending: dict[object, Pending] = {}
        self.exchanges: dict[int, int] = {}
        self.values: dict[int, Value] = {}
        self.round: Round | None = None
        self._cluster = cluster
        self._program: Generator[Any, Any, None] | None = None

    # -- the program -----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.started = True
        self._program = self._calls()
        self._advance(lambda: next(self._program))  # type: ignore[arg-type]

    def _calls(self) -> Generator[Any, Any, None]:
        while self.protocol.committed < CALLS:
            number = self.protocol.committed
            round_ = self.round = Round(number, OPERATIONS, f"call {number}")
            self.values = {}
            success = yield from run_round(self.protocol, round_)
            self.outcomes[number] = success, {i: v for i, v in self.values.items() if round_.finished[i]}
            if number % 2:
                yield from pass_boundary(self.protocol)

    def _advance(self, go: Callable[[], Any]) -> None:
        try:
            step = go()
        except StopIteration:
            self._end("done")
            self._cluster.perform(self, self.protocol.leave("left", "done"))
            return
        self._cluster.step(self, step)

    def resume(self, value: Any = None) -> None:
        assert self._program is not None
        if self.state == "running":
            self._advance(lambda: self._program.send(value))  # type: ignore[union-attr]

    def over(self) -> None:
        """The awaited event cannot happen any more: the view has ended."""
        if self.state == "running":
            self._advance(lambda: self._program.throw(ViewEnded()))  # type: ignore[union-attr]

    def fail(self, reason: str) -> None:
        if self.state == "running":
            self._end(reason)

    def _end(self, state: str) -> None:
        self.state = state
        self.pending.clear()


class Cluster:
    """A schedule; all random choices come from the seed."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.seed = seed
        self.now_s = 0.0
        self.log: list[str] = []
        self.members: dict[str, Member] = {}
        self.persisted = View(0, ())
        self.longest_view_change_s = 0.0
        self._chance = random.Random(f"{scenario.name} {seed}")
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._worlds: dict[int, World] = {}
        self._rifts: list[frozenset[str]] = []
        self._arrivals: dict[tuple[str, bool], float] = {}
        self._coordinator: Coordinator | None = Coordinator(
            initial_members=scenario.members, regroup_timeout_s=PATIENCE_S
        )
        self._tick_s: float | None = None
        self._incarnation = 0

    def run(self) -> None:
        """Run the schedule, with checks during it and at the end."""
        scenario, chance = self.scenario, self._chance
        for number in range(scenario.members):
            self.after(chance.uniform(0, 0.5), lambda name=f"m{number}": self._join(name))  # type: ignore[misc]
        span_s = chance.choice((1.0, 4.0, 15.0))
        for kind, count in (
            (self._kill, scenario.kills),
            (self._freeze, scenario.freezes),
            (self._cut, scenario.cuts),
            (self._rift, scenario.rifts),
            (self._restart, scenario.restarts),
        ):
            for _ in range(count):
                self.after(chance.uniform(0.4, span_s), kind)
        for number in range(scenario.joins):
            self.after(chance.uniform(0.2, span_s), lambda name=f"n{number}": self._join(name))  # type: ignore[misc]
        while self._events and self.now_s < BOUND_S:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.check()

    # -- invariants --------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        for member in self.members.values():
            assert member.state != "running", (
                f"{member.name} waits forever, in {member.protocol.phase} of view {member.protocol.view.number}"
            )
            if member.state not in ("done", "killed"):
                assert member.harmed or self.scenario.blames_the_innocent or self._came_too_late(member), (
                    f"{member.name} failed without a fault: {member.state}"
                )
        for number in range(CALLS):
            self._check_call(number)
        if not any((self.scenario.freezes, self.scenario.cuts, self.scenario.rifts, self.scenario.restarts)):
            bound_s = AFTER_A_KILL_S * (1 + self.scenario.kills)
            assert self.longest_view_change_s < bound_s, (
                f"a view change took {self.longest_view_change_s:.2f} s after a kill"
            )

    def _came_too_late(self, member: Member) -> bool:
        """Whether a newcomer arrived after the others had left their last boundary."""
        return not member.protocol.view.number

    def _check_call(self, number: int) -> None:
        seen: dict[int, Value] = {}
        for member in self.members.values():
            if number not in member.outcomes:
                continue
            success, values = member.outcomes[number]
            assert success == (len(values) == OPERATIONS), f"{member.name} has a wrong result in call {number}"
            for index, value in values.items():
                known = seen.setdefault(index, value)
                assert value == known, f"call {number}, operation {index}: {member.name} has {value}, another {known}"
                assert member.name in value[1], f"{member.name} has a result without its own operand: {value}"
                assert value[1] == set(self._worlds[value[0]].view.ids()), "not everybody of that view is in it"

    # -- time and processes ------------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._sequence), event))

    def at(self, member: Member, delay_s: float, event: Callable[[], None]) -> None:
        """Schedule an event of a process: dropped if it is killed by then, delayed if it is frozen."""

        def happen() -> None:
            if member.state == "killed":
                return
            if member.frozen:
                member.held.append(happen)
            else:
                event()

        self.after(delay_s, happen)

    def say(self, text: str) -> None:
        self.log.append(f"{self.now_s:8.3f}  {text}")

    def _join(self, name: str) -> None:
        member = self.members[name] = Member(self, name)
        self.say(f"{name} starts")
        self._connect(member)
        self.at(member, VIEW_CHANGE_S * 2, lambda: self._give_up_joining(member))

    def _give_up_joining(self, member: Member) -> None:
        if not member.protocol.view.number:
            self.perform(member, member.protocol.leave("view_change", "no view included this member"))

    def _alive(self) -> list[Member]:
        return [member for member in self.members.values() if member.state == "running" and not member.frozen]

    def _victim(self) -> Member | None:
        alive = self._alive()
        return self._chance.choice(alive) if len(alive) > 1 else None

    def _kill(self) -> None:
        if member := self._victim():
            self.say(f"{member.name} is killed")
            member.state, member.harmed = "killed", True
            self._lose_link(member, self._moment())
            self._down(member, "exit")

    def _freeze(self) -> None:
        if member := self._victim():
            for_s = self._chance.choice((0.5, 1.1, 1.3, 5.0, 30.0))
            self.say(f"{member.name} is frozen for {for_s} s")
            member.frozen = member.harmed = True
            since_s = self.now_s

            def noticed() -> None:
                if member.frozen and self.now_s - since_s >= SILENCE_S:
                    self._lose_link(member, 0)
                    self._down(member, "hang")

            self.after(SILENCE_S + self._chance.uniform(0, 0.2), noticed)
            self.after(for_s, lambda: self._wake(member))

    def _wake(self, member: Member) -> None:
        self.say(f"{member.name} wakes")
        member.frozen = False
        held, member.held = member.held, []
        for event in held:
            event()

    def _cut(self) -> None:
        """A member can reach all other members but not the rendezvous server."""
        if member := self._victim():
            self.say(f"{member.name} is cut off from the rendezvous")
            member.cut = member.harmed = True
            self._lose_link(member, SILENCE_S)

            def heal() -> None:
                member.cut = False

            self.after(self._chance.choice((3.0, 30.0, 100.0)), heal)

    def _rift(self) -> None:
        """Two members can reach the rendezvous server but not each other."""
        alive = self._alive()
        if len(alive) < 3:
            return
        pair = self._chance.sample(alive, 2)
        self.say(f"{pair[0].name} and {pair[1].name} cannot reach each other")
        self._rifts.append(frozenset(member.name for member in pair))
        for world in self._worlds.values():
            if not world.down and self._torn(world):
                self._tear(world)

    def _restart(self) -> None:
        if self._coordinator is None:
            return
        self.say("the rendezvous is killed")
        self._coordinator = None
        self._incarnation += 1
        self._tick_s = None
        for member in self.members.values():
            if member.state == "running" and member.linked:
                member.linked = False
                self.at(member, self._moment(), lambda member=member: self._reconnect(member))  # type: ignore[misc]

        def start() -> None:
            self.say(f"the rendezvous starts again, with view {self.persisted.number}")
            self._coordinator = Coordinator(
                initial_members=self.scenario.members,
                regroup_timeout_s=PATIENCE_S,
                view=self.persisted,
                now_s=self.now_s,
            )
            self._set_tick()

        self.after(self._chance.uniform(0.1, 3.0), start)

    def _moment(self) -> float:
        """A random short delay: usually milliseconds, sometimes much longer."""
        return self._chance.choice((0.001, 0.002, 0.01, 0.03, 0.2)) * self._chance.uniform(0.5, 1.5)

    def _in_order(self, member: Member, upwards: bool) -> float:
        """When the next message of a connection arrives: in order, and late."""
        at_s = max(self._arrivals.get((member.name, upwards), 0.0), self.now_s) + self._moment()
        self._arrivals[member.name, upwards] = at_s
        return at_s - self.now_s

    # -- the rendezvous server -----------------------------------------------------------------------------------------------------

    def _connect(self, member: Member) -> None:
        """Connect to the rendezvous server as the member agent does: retry until it responds."""
        if member.state != "running":
            return
        if self._coordinator is None or member.cut:
            self.at(member, 0.3, lambda: self._connect(member))
            return
        resume = member.protocol.phase != "waiting"
        if resume and not self._coordinator.may_resume(member.name):
            self.at(
                member, self._moment(), lambda: self.perform(member, member.protocol.on_message(Evicted("given up")))
            )
            return
        member.linked = True
        info, incarnation = MemberInfo(member.name, "host", 1), self._incarnation

        def arrive() -> None:
            if self._coordinator is not None and incarnation == self._incarnation and member.linked:
                self._decided(self._coordinator.on_join(info, self.now_s))
                if resume:
                    self.at(member, self._moment(), lambda: self.perform(member, member.protocol.on_reconnected()))

        self.after(self._in_order(member, True), arrive)

    def _reconnect(self, member: Member) -> None:
        if member.state == "running":
            self._connect(member)
            self.at(member, VIEW_CHANGE_S, lambda: None if member.linked else self._sever(member))

    def _sever(self, member: Member) -> None:
        self.perform(member, member.protocol.on_rendezvous_lost("the rendezvous cannot be reached"))

    def _lose_link(self, member: Member, after_s: float) -> None:
        if not member.linked:
            return
        member.linked = False
        incarnation = self._incarnation

        def noticed() -> None:
            if self._coordinator is not None and incarnation == self._incarnation:
                self._decided(self._coordinator.on_lost(member.name, self.now_s))

        self.after(after_s + self._moment(), noticed)
        self.at(member, after_s + self._moment(), lambda: self._reconnect(member))

    def _decided(self, actions: list[coordinator.Action]) -> None:
        for action in actions:
            match action:
                case Persist(view):
                    order = (view.number, view.boundaries), (self.persisted.number, self.persisted.boundaries)
                    assert order[0] > order[1], "view numbers only increase"
                    self.say(
                        f"view {view.number}: {' '.join(view.ids())}, {view.committed} committed, {view.boundaries} boundaries"
                    )
                    self.persisted = view
                case SendTo(name, message):
                    self._tell(self.members[name], message)
                case Disconnect(name):
                    self._lose_link(self.members[name], 1.0)
        self._set_tick()

    def _tell(self, member: Member, message: Message) -> None:
        if not member.linked:
            return
        incarnation = self._incarnation
        copied = decode(encode(message))

        def heard() -> None:
            if member.linked and incarnation == self._incarnation:
                self.perform(member, member.protocol.on_message(copied))

        self.at(member, self._in_order(member, False), heard)

    def _set_tick(self) -> None:
        due_s = self._coordinator.deadline_s if self._coordinator is not None else None
        if due_s is None or due_s == self._tick_s:
            return
        self._tick_s, incarnation = due_s, self._incarnation

        def tick() -> None:
            if self._coordinator is not None and incarnation == self._incarnation:
                self._decided(self._coordinator.on_tick(self.now_s))

        self.after(due_s - self.now_s, tick)

    # -- the driver of a member --------------------------------------------------------------------------------------------------

    def perform(self, member: Member, actions: list[member_state.Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self._send(member, message)
                case CloseView():
                    self._down(member, "left")
                    self._broken(member)
                case FormView(view):
                    self._form(member, view)
                case ViewReady(view):
                    self.say(f"{member.name} is ready in view {view.number}")
                    if not member.started:
                        member.start()
                case EndBoundary(None):
                    self._done(member, (member.protocol.view.number, "boundary"), None)
                case EndBoundary(str(reason)):
                    member.fail(reason)
                case EndMembership(_, reason):
                    self.say(f"{member.name} is out: {reason}")
                    member.fail(reason)
        waiting = member.pending.get("await")
        if (
            waiting is not None
            and member.protocol.view.number > waiting.view_number
            and member.protocol.is_in(member.protocol.view.number)
        ):
            del member.pending["await"]
            waiting.done(member.protocol.view.number)

    def _send(self, member: Member, message: Message) -> None:
        if not member.linked:
            return
        incarnation = self._incarnation

        def heard() -> None:
            if self._coordinator is not None and incarnation == self._incarnation and member.linked:
                self._decided(self._coordinator.on_message(member.name, message, self.now_s))

        self.after(self._in_order(member, True), heard)

    def step(self, member: Member, step: Any) -> None:
        """Start the next steps of a member's program."""
        match step:
            case AwaitView(after):
                since_s = self.now_s
                self._wait(
                    member, "await", after, lambda view_number: self._formed_after(member, since_s, after, view_number)
                )
                self.at(member, VIEW_CHANGE_S, lambda: self._give_up(member, after) if after else None)
                self.perform(member, [])
            case AllGather(view_number, data):
                nth = member.exchanges[view_number] = member.exchanges.get(view_number, 0) + 1
                self._take_part(
                    member, view_number, ("exchange", nth), data, lambda said: member.resume(list(said.values()))
                )
            case RunOperations(view_number, _):
                self._run(member, view_number)
            case AwaitBoundary(view_number):
                pending = member.pending[view_number, "boundary"] = Pending(
                    view_number, lambda _: member.resume(), member.over
                )
                if member.protocol.phase == "ready" and member.protocol.view.number == view_number:
                    self.perform(member, member.protocol.enter_boundary(view_number))
                else:
                    self.at(member, 0, lambda: self._overtaken(member, (view_number, "boundary"), pending))

    def _formed_after(self, member: Member, since_s: float, after: int, view_number: int) -> None:
        if after and member.protocol.committed < CALLS:  # at the last boundary the members leave one after another
            self.longest_view_change_s = max(self.longest_view_change_s, self.now_s - since_s)
        member.resume(view_number)

    def _give_up(self, member: Member, after: int) -> None:
        if (waiting := member.pending.get("await")) is not None and waiting.view_number == after:
            self.perform(member, member.protocol.leave("view_change", f"no view after {after}"))

    def _wait(self, member: Member, what: object, view_number: int, done: Callable[[Any], None]) -> None:
        member.pending[what] = Pending(view_number, done, lambda: None)

    def _done(self, member: Member, what: object, value: Any) -> None:
        if waiting := member.pending.pop(what, None):
            waiting.done(value)

    def _run(self, member: Member, view_number: int) -> None:
        """Like retry.py: a limited number of concurrent operations; after a failure none is started, and running ones are awaited."""
        round_ = member.round
        assert round_ is not None
        todo = round_.unfinished
        state = {"running": 0, "failed": False}

        def settle(index: int, value: Value | None) -> None:
            state["running"] -= 1
            if value is None:
                state["failed"] = True
            else:
                member.values[index] = value
                round_.finished[index] = True
            advance()

        def begin(index: int) -> None:
            state["running"] += 1
            key = ("operation", round_.number, index)
            self._take_part(
                member, view_number, key, member.name, lambda parts: settle(index, (view_number, frozenset(parts.values()))),
                lambda: settle(index, None),
            )  # fmt: skip

        def advance() -> None:
            while todo and state["running"] < IN_FLIGHT and not state["failed"]:
                begin(todo.pop(0))
            if not state["running"]:
                if state["failed"]:
                    member.over()
                else:
                    member.resume()

        advance()

    # -- the worlds of views -------------------------------------------------------------------------------------------------------------

    def _form(self, member: Member, view: View) -> None:
        world = self._worlds.setdefault(view.number, World(view))
        world.came.add(member.name)
        view_number = view.number
        self.at(member, FORM_S, lambda: self._failed(member, view_number) if member.name not in world.up else None)
        if world.down:
            self.at(member, self._moment(), lambda: self._failed(member, view_number))
        elif world.came == set(view.ids()):
            if self._torn(world):
                self._tear(world)
                return
            for name in view.ids():
                self.at(self.members[name], self._moment(), lambda name=name: self._up(self.members[name], world))  # type: ignore[misc]

    def _up(self, member: Member, world: World) -> None:
        if not world.down and member.protocol.phase == "forming" and member.protocol.view.number == world.view.number:
            world.up.add(member.name)
            self.perform(member, member.protocol.on_formed(world.view.number))

    def _failed(self, member: Member, view_number: int, suspect: str = "") -> None:
        if member.protocol.view.number == view_number and member.state != "killed":
            actions = member.protocol.on_failed(view_number, suspect)
            self._broken(member)
            self.perform(member, actions)

    def _down(self, member: Member, cause: str) -> None:
        """A member is lost from the world of its view, and each other member detects it at its own time."""
        world = self._worlds.get(member.protocol.view.number)
        if world is None or world.down or member.name not in world.came:
            return
        world.down = True
        suspect = member.name if cause != "left" else ""
        for name in sorted(world.came - {member.name}):
            other = self.members[name]
            self.at(other, self._moment(), lambda other=other: self._failed(other, world.view.number, suspect))  # type: ignore[misc]

    def _torn(self, world: World) -> bool:
        return any(pair <= set(world.view.ids()) for pair in self._rifts)

    def _tear(self, world: World) -> None:
        """Rank 0 and each other member monitor each other; two others that lose their connection cannot name the failed one."""
        world.down = True
        pair = next(pair for pair in self._rifts if pair <= set(world.view.ids()))
        first = world.view.ids()[0]
        for name in sorted(world.came):
            suspect = next(iter(pair - {name})) if first in pair and name in pair else ""
            other = self.members[name]
            self.at(other, SILENCE_S + self._moment(), lambda o=other, a=suspect: self._failed(o, world.view.number, a))  # type: ignore[misc]

    def _take_part(
        self, member: Member, view_number: int, key: tuple[object, ...], part: Any, done: Callable[[dict[str, Any]], None],
        over: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        world = self._worlds[view_number]
        pending = member.pending[view_number, key] = Pending(view_number, done, over or member.over)
        if not member.protocol.is_in(view_number):
            self.at(member, 0, lambda: self._overtaken(member, (view_number, key), pending))
            return
        parts = world.parts.setdefault(key, {})
        assert member.name not in parts, f"{member.name} takes part in {key} of view {view_number} twice"
        parts[member.name] = part
        if parts.keys() == set(world.view.ids()):
            ranked = {name: parts[name] for name in world.view.ids()}
            for name in ranked:
                self._complete(self.members[name], (view_number, key), ranked)

    def _complete(self, member: Member, key: tuple[int, object], ranked: dict[str, Any]) -> None:
        """Complete the operation at this member soon, unless it learns before that the world is broken."""

        def complete() -> None:
            if member.state == "running":
                self._done(member, key, ranked)

        self.at(member, self._moment(), complete)

    def _overtaken(self, member: Member, key: tuple[int, object], pending: Pending) -> None:
        if member.pending.get(key) is pending:
            del member.pending[key]
            pending.over()

    def _broken(self, member: Member) -> None:
        """Fail all operations in flight at this member."""
        failed = [key for key in member.pending if isinstance(key, tuple)]
        for key in failed:
            self.at(member, 0, lambda key=key, pending=member.pending[key]: self._overtaken(member, key, pending))  # type: ignore[misc]


def replay(name: str, seed: int) -> Cluster:
    """Run one schedule. Raises AssertionError with a note that tells how to reproduce it."""
    cluster = Cluster(next(each for each in SCENARIOS if each.name == name), seed)
    try:
        cluster.run()
    except Exception as error:
        error.add_note(f"replay: python -m tests.simulation.elastic_cluster {name} {seed}")
        raise
    return cluster


if __name__ == "__main__":
    chosen = Cluster(next(each for each in SCENARIOS if each.name == sys.argv[1]), int(sys.argv[2]))
    try:
        chosen.run()
    finally:
        print("\n".join(chosen.log))
