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

from multiworld.elastic.protocol import coordinator as holder
from multiworld.elastic.protocol import member_state as moves
from multiworld.elastic.protocol.commit_protocol import Await, EpochOver, Exchange, Run, Stand, conduct, pass_boundary
from multiworld.elastic.protocol.coordinator import Coordinator, Drop, Remember, Tell
from multiworld.elastic.protocol.member_state import (
    BoundaryFailed,
    BoundaryPassed,
    CloseEpoch,
    Fail,
    Form,
    MemberState,
    Ready,
    Send,
)
from multiworld.elastic.protocol.messages import Evicted, MemberInfo, Message, View, decode, encode
from multiworld.elastic.protocol.rounds import Round

SILENCE_S = 1.2
"""When a silent member counts as lost: heartbeat_timeout_s plus one interval."""
PATIENCE_S = 10.0
FORM_S = 10.0
REFORM_S = 60.0
CALLS = 6
OPERATIONS = 7
IN_FLIGHT = 3
AFTER_A_KILL_S = 1.2
"""A view change after a kill takes some messages, each of which may be slow (`_moment`), and waits for no timeout."""
BOUND_S = 400.0
"""Virtual time by which every member has ended: much more than a few faults can cost."""

Value = tuple[int, frozenset[str]]
"""Result of an operation: the view in which it was done, and the members whose operands it contains."""


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

    epoch: int
    done: Callable[[Any], None]
    over: Callable[[], None]


class Member:
    """A process."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.seat = MemberState(name)
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
        while self.seat.closed < CALLS:
            number = self.seat.closed
            round_ = self.round = Round(number, OPERATIONS, f"call {number}")
            self.values = {}
            success = yield from conduct(self.seat, round_)
            self.outcomes[number] = success, {i: v for i, v in self.values.items() if round_.finished[i]}
            if number % 2:
                yield from pass_boundary(self.seat)

    def _advance(self, go: Callable[[], Any]) -> None:
        try:
            step = go()
        except StopIteration:
            self._end("done")
            self._cluster.perform(self, self.seat.give_up("left", "done"))
            return
        self._cluster.step(self, step)

    def resume(self, value: Any = None) -> None:
        assert self._program is not None
        if self.state == "running":
            self._advance(lambda: self._program.send(value))  # type: ignore[union-attr]

    def over(self) -> None:
        """The awaited event cannot happen any more: the view has ended."""
        if self.state == "running":
            self._advance(lambda: self._program.throw(EpochOver()))  # type: ignore[union-attr]

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
        self.remembered = View(0, ())
        self.longest_reform_s = 0.0
        self._chance = random.Random(f"{scenario.name} {seed}")
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._worlds: dict[int, World] = {}
        self._rifts: list[frozenset[str]] = []
        self._arrivals: dict[tuple[str, bool], float] = {}
        self._coordinator: Coordinator | None = Coordinator(first_size=scenario.members, patience_s=PATIENCE_S)
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
                f"{member.name} waits forever, in {member.seat.state} of epoch {member.seat.epoch}"
            )
            if member.state not in ("done", "killed"):
                assert member.harmed or self.scenario.blames_the_innocent or self._came_too_late(member), (
                    f"{member.name} failed without a fault: {member.state}"
                )
        for number in range(CALLS):
            self._check_call(number)
        if not any((self.scenario.freezes, self.scenario.cuts, self.scenario.rifts, self.scenario.restarts)):
            bound_s = AFTER_A_KILL_S * (1 + self.scenario.kills)
            assert self.longest_reform_s < bound_s, f"an epoch took {self.longest_reform_s:.2f} s after a kill"

    def _came_too_late(self, member: Member) -> bool:
        """Whether a newcomer arrived after the others had left their last boundary."""
        return not member.seat.epoch

    def _check_call(self, number: int) -> None:
        seen: dict[int, Value] = {}
        for member in self.members.values():
            if number not in member.outcomes:
                continue
            success, values = member.outcomes[number]
            assert success == (len(values) == OPERATIONS), f"{member.name} reports a wrong success of call {number}"
            for index, value in values.items():
                known = seen.setdefault(index, value)
                assert value == known, f"call {number}, operation {index}: {member.name} has {value}, another {known}"
                assert member.name in value[1], f"{member.name} has a result without its own operand: {value}"
                assert value[1] == set(self._worlds[value[0]].view.ids()), "a member of that view is missing"

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
        self.at(member, REFORM_S * 2, lambda: self._give_up_joining(member))

    def _give_up_joining(self, member: Member) -> None:
        if not member.seat.epoch:
            self.perform(member, member.seat.give_up("reform", "no epoch took us in"))

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
            self.say(f"the rendezvous starts again, with epoch {self.remembered.epoch}")
            self._coordinator = Coordinator(
                first_size=self.scenario.members, patience_s=PATIENCE_S, view=self.remembered, now_s=self.now_s
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
        resume = member.seat.state != "waiting"
        if resume and not self._coordinator.may_resume(member.name):
            self.at(member, self._moment(), lambda: self.perform(member, member.seat.heard(Evicted("given up"))))
            return
        member.linked = True
        seating, incarnation = MemberInfo(member.name, "host", 1), self._incarnation

        def arrive() -> None:
            if self._coordinator is not None and incarnation == self._incarnation and member.linked:
                self._decided(self._coordinator.join(seating, self.now_s))
                if resume:
                    self.at(member, self._moment(), lambda: self.perform(member, member.seat.reconnected()))

        self.after(self._in_order(member, True), arrive)

    def _reconnect(self, member: Member) -> None:
        if member.state == "running":
            self._connect(member)
            self.at(member, REFORM_S, lambda: None if member.linked else self._sever(member))

    def _sever(self, member: Member) -> None:
        self.perform(member, member.seat.severed("the rendezvous cannot be reached"))

    def _lose_link(self, member: Member, after_s: float) -> None:
        if not member.linked:
            return
        member.linked = False
        incarnation = self._incarnation

        def noticed() -> None:
            if self._coordinator is not None and incarnation == self._incarnation:
                self._decided(self._coordinator.lost(member.name, self.now_s))

        self.after(after_s + self._moment(), noticed)
        self.at(member, after_s + self._moment(), lambda: self._reconnect(member))

    def _decided(self, actions: list[holder.Action]) -> None:
        for action in actions:
            match action:
                case Remember(view):
                    order = (view.epoch, view.boundaries), (self.remembered.epoch, self.remembered.boundaries)
                    assert order[0] > order[1], "generations only increase"
                    self.say(
                        f"epoch {view.epoch}: {' '.join(view.ids())}, {view.closed} closed, {view.boundaries} boundaries"
                    )
                    self.remembered = view
                case Tell(name, message):
                    self._tell(self.members[name], message)
                case Drop(name):
                    self._lose_link(self.members[name], 1.0)
        self._set_tick()

    def _tell(self, member: Member, message: Message) -> None:
        if not member.linked:
            return
        incarnation = self._incarnation
        copied = decode(encode(message))

        def heard() -> None:
            if member.linked and incarnation == self._incarnation:
                self.perform(member, member.seat.heard(copied))

        self.at(member, self._in_order(member, False), heard)

    def _set_tick(self) -> None:
        due_s = self._coordinator.due_s if self._coordinator is not None else None
        if due_s is None or due_s == self._tick_s:
            return
        self._tick_s, incarnation = due_s, self._incarnation

        def tick() -> None:
            if self._coordinator is not None and incarnation == self._incarnation:
                self._decided(self._coordinator.tick(self.now_s))

        self.after(due_s - self.now_s, tick)

    # -- the driver of a member --------------------------------------------------------------------------------------------------

    def perform(self, member: Member, actions: list[moves.Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self._send(member, message)
                case CloseEpoch():
                    self._down(member, "left")
                    self._broken(member)
                case Form(view):
                    self._form(member, view)
                case Ready(view):
                    self.say(f"{member.name} is ready in epoch {view.epoch}")
                    if not member.started:
                        member.start()
                case BoundaryPassed():
                    self._done(member, (member.seat.epoch, "boundary"), None)
                case BoundaryFailed(reason):
                    member.fail(reason)
                case Fail(_, reason):
                    self.say(f"{member.name} is out: {reason}")
                    member.fail(reason)
        waiting = member.pending.get("await")
        if waiting is not None and member.seat.epoch > waiting.epoch and member.seat.is_in(member.seat.epoch):
            del member.pending["await"]
            waiting.done(member.seat.epoch)

    def _send(self, member: Member, message: Message) -> None:
        if not member.linked:
            return
        incarnation = self._incarnation

        def heard() -> None:
            if self._coordinator is not None and incarnation == self._incarnation and member.linked:
                self._decided(self._coordinator.heard(member.name, message, self.now_s))

        self.after(self._in_order(member, True), heard)

    def step(self, member: Member, step: Any) -> None:
        """Start the next steps of a member's program."""
        match step:
            case Await(after):
                since_s = self.now_s
                self._wait(member, "await", after, lambda epoch: self._formed_after(member, since_s, after, epoch))
                self.at(member, REFORM_S, lambda: self._give_up(member, after) if after else None)
                self.perform(member, [])
            case Exchange(epoch, data):
                nth = member.exchanges[epoch] = member.exchanges.get(epoch, 0) + 1
                self._take_part(member, epoch, ("exchange", nth), data, lambda said: member.resume(list(said.values())))
            case Run(epoch, _):
                self._run(member, epoch)
            case Stand(epoch):
                pending = member.pending[epoch, "boundary"] = Pending(epoch, lambda _: member.resume(), member.over)
                if member.seat.state == "ready" and member.seat.epoch == epoch:
                    self.perform(member, member.seat.stand_at_boundary(epoch))
                else:
                    self.at(member, 0, lambda: self._overtaken(member, (epoch, "boundary"), pending))

    def _formed_after(self, member: Member, since_s: float, after: int, epoch: int) -> None:
        if after and member.seat.closed < CALLS:  # at the last boundary the members leave one after another
            self.longest_reform_s = max(self.longest_reform_s, self.now_s - since_s)
        member.resume(epoch)

    def _give_up(self, member: Member, after: int) -> None:
        if (waiting := member.pending.get("await")) is not None and waiting.epoch == after:
            self.perform(member, member.seat.give_up("reform", f"no epoch after {after}"))

    def _wait(self, member: Member, what: object, epoch: int, done: Callable[[Any], None]) -> None:
        member.pending[what] = Pending(epoch, done, lambda: None)

    def _done(self, member: Member, what: object, value: Any) -> None:
        if waiting := member.pending.pop(what, None):
            waiting.done(value)

    def _run(self, member: Member, epoch: int) -> None:
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
                round_.finish(index)
            advance()

        def begin(index: int) -> None:
            state["running"] += 1
            key = ("operation", round_.number, index)
            self._take_part(
                member, epoch, key, member.name, lambda parts: settle(index, (epoch, frozenset(parts.values()))),
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
        world = self._worlds.setdefault(view.epoch, World(view))
        world.came.add(member.name)
        epoch = view.epoch
        self.at(member, FORM_S, lambda: self._failed(member, epoch) if member.name not in world.up else None)
        if world.down:
            self.at(member, self._moment(), lambda: self._failed(member, epoch))
        elif world.came == set(view.ids()):
            if self._torn(world):
                self._tear(world)
                return
            for name in view.ids():
                self.at(self.members[name], self._moment(), lambda name=name: self._up(self.members[name], world))  # type: ignore[misc]

    def _up(self, member: Member, world: World) -> None:
        if not world.down and member.seat.state == "forming" and member.seat.epoch == world.view.epoch:
            world.up.add(member.name)
            self.perform(member, member.seat.formed(world.view.epoch))

    def _failed(self, member: Member, epoch: int, accused: str = "") -> None:
        if member.seat.epoch == epoch and member.state != "killed":
            actions = member.seat.failed(epoch, accused)
            self._broken(member)
            self.perform(member, actions)

    def _down(self, member: Member, cause: str) -> None:
        """A member is lost from the world of its view, and each other member detects it at its own time."""
        world = self._worlds.get(member.seat.epoch)
        if world is None or world.down or member.name not in world.came:
            return
        world.down = True
        accused = member.name if cause != "left" else ""
        for name in sorted(world.came - {member.name}):
            other = self.members[name]
            self.at(other, self._moment(), lambda other=other: self._failed(other, world.view.epoch, accused))  # type: ignore[misc]

    def _torn(self, world: World) -> bool:
        return any(pair <= set(world.view.ids()) for pair in self._rifts)

    def _tear(self, world: World) -> None:
        """Rank 0 and each other member monitor each other; two others that lose their connection cannot name the failed one."""
        world.down = True
        pair = next(pair for pair in self._rifts if pair <= set(world.view.ids()))
        first = world.view.ids()[0]
        for name in sorted(world.came):
            accused = next(iter(pair - {name})) if first in pair and name in pair else ""
            other = self.members[name]
            self.at(other, SILENCE_S + self._moment(), lambda o=other, a=accused: self._failed(o, world.view.epoch, a))  # type: ignore[misc]

    def _take_part(
        self, member: Member, epoch: int, key: tuple[object, ...], part: Any, done: Callable[[dict[str, Any]], None],
        over: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        world = self._worlds[epoch]
        pending = member.pending[epoch, key] = Pending(epoch, done, over or member.over)
        if not member.seat.is_in(epoch):
            self.at(member, 0, lambda: self._overtaken(member, (epoch, key), pending))
            return
        parts = world.parts.setdefault(key, {})
        assert member.name not in parts, f"{member.name} takes part in {key} of epoch {epoch} twice"
        parts[member.name] = part
        if parts.keys() == set(world.view.ids()):
            ranked = {name: parts[name] for name in world.view.ids()}
            for name in ranked:
                self._complete(self.members[name], (epoch, key), ranked)

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
