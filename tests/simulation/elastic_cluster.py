"""Elastic worlds in virtual time: the product's coordinator, members, rounds and calls, with a network and processes that fail by a seed.

    python -m tests.simulation.elastic_cluster kills 17

replays a schedule and prints its events. Simulated are processes (killed, frozen, continued), connections (delays, partitions), the
worlds of views (they form when all members have joined, and break at each member at another time) and operations (finished when all have
taken part, at each member at another time, or never). All decisions are made by the product's code.
"""

import heapq
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from multiworld.elastic.protocol import coordinator, member_state
from multiworld.elastic.protocol.commit_protocol import pass_boundary, run_round
from multiworld.elastic.protocol.coordinator import Coordinator, Persist, SendTo
from multiworld.elastic.protocol.member_state import CloseView, EndMembership, FormView, MemberState, Send
from multiworld.elastic.protocol.messages import Evicted, MemberInfo, Message, View, decode, encode
from multiworld.elastic.protocol.rounds import Round
from multiworld.errors import BrokenWorldException, ElasticError, ViewChangeError

SILENCE_S = 1.2
"""When a silent member counts as lost: heartbeat_timeout_s plus one interval."""
PATIENCE_S = 10.0
FORM_S = 10.0
VIEW_CHANGE_S = 60.0
ROUNDS = 9
"""Calls and boundaries: after every two calls there is a boundary."""
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
    parts: dict[object, dict[str, Any]] = field(default_factory=dict)
    """Operation → member → operand."""


class Until:
    """Awaitable: the program of a member continues when the condition is true."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self._condition = condition

    def __await__(self) -> Generator[Callable[[], bool], None, None]:
        yield self._condition


class Member:
    """A process, and the `Member` of its calls (see commit_protocol.py)."""

    def __init__(self, cluster: "Cluster", name: str) -> None:
        self.name = name
        self.state = MemberState(name)
        self.status = "running"
        """running, killed, done, or the reason of its failure."""
        self.harmed = False
        self.frozen = False
        self.cut = False
        self.held: list[Callable[[], None]] = []
        self.linked = True
        self.outcomes: dict[int, tuple[bool, dict[int, Value]]] = {}
        self.results: dict[object, dict[str, Any]] = {}
        """Key of an all-gather or operation that finished here → member → operand."""
        self._exchanges: Counter[int] = Counter()
        self._cluster = cluster
        self._program: Coroutine[Callable[[], bool], None, None] = self._calls()
        self._condition: Callable[[], bool] | None = lambda: True

    def poke(self) -> None:
        """Continue the program if what it waits for has happened."""
        while self.status == "running" and self._condition is not None and self._condition():
            self._condition = None  # the program may cause events of this member
            try:
                self._condition = self._program.send(None)
            except StopIteration:
                self.status = "done"
                self._cluster.perform(self, self.state.leave(ElasticError, "done"))
            except ElasticError as error:
                self.fail(str(error))

    def fail(self, reason: str) -> None:
        if self.status == "running":
            self.status = reason

    async def _calls(self) -> None:
        await self.next_view(0)
        while self.state.committed < ROUNDS:
            number = self.state.committed
            if number % 3 == 2:
                await pass_boundary(self)
                continue
            round_, values = Round(number, OPERATIONS, f"call {number}"), dict[int, Value]()

            async def run(view_number: int, round_: Round = round_, values: Any = values) -> None:
                await self._run(view_number, round_, values)

            success = await run_round(self, round_, run)
            self.outcomes[number] = success, {i: v for i, v in values.items() if round_.finished[i]}

    async def _run(self, view_number: int, round_: Round, values: dict[int, Value]) -> None:
        """Like `AllReduceCall.run`: a limited number of concurrent operations; after a failure none is started, and all are awaited."""
        started: dict[int, object] = {}

        def in_flight() -> int:
            return sum(key not in self.results for key in started.values()) if self.state.is_in(view_number) else 0

        for index in round_.unfinished:
            await Until(lambda: in_flight() < IN_FLIGHT)
            if not self.state.is_in(view_number):
                break
            key: object = (view_number, "operation", round_.number, index)
            started[index] = key
            self._cluster.take_part(self, view_number, key, self.name)
        await Until(lambda: not in_flight())
        for index, key in started.items():
            if key in self.results:
                values[index] = view_number, frozenset(self.results[key])
                round_.finished[index] = True
        if not self.state.is_in(view_number):
            raise self.view_ended(view_number)

    # -- the steps of a call -----------------------------------------------------------------------------------------------------

    async def next_view(self, after: int) -> int:
        state, cluster, since_s = self.state, self._cluster, self._cluster.now_s
        arrived: list[int] = []

        def give_up() -> None:
            if after and not arrived:
                cluster.perform(self, state.leave(ViewChangeError, f"no view after {after}"))

        cluster.at(self, VIEW_CHANGE_S, give_up)
        await Until(lambda: state.view.number > after and state.is_in(state.view.number))
        arrived.append(state.view.number)
        if after and state.committed < ROUNDS:  # at the last boundary the members leave one after another
            cluster.longest_view_change_s = max(cluster.longest_view_change_s, cluster.now_s - since_s)
        return state.view.number

    async def all_gather(self, view_number: int, data: bytes) -> list[bytes]:
        self._exchanges[view_number] += 1
        key = (view_number, "exchange", self._exchanges[view_number])
        if self.state.is_in(view_number):
            self._cluster.take_part(self, view_number, key, data)
        await Until(lambda: key in self.results or not self.state.is_in(view_number))
        if key not in self.results:
            raise self.view_ended(view_number)
        return list(self.results[key].values())

    def perform(self, actions: Sequence[member_state.Action]) -> None:
        self._cluster.perform(self, actions)

    def view_ended(self, view_number: int) -> BrokenWorldException:
        return BrokenWorldException("w", f"view {view_number} has ended")


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
            assert member.status != "running", (
                f"{member.name} waits forever, in {member.state.phase} of view {member.state.view.number}"
            )
            if member.status not in ("done", "killed"):
                # Of two healthy members that cannot reach each other one must be evicted.
                came_too_late = not member.state.view.number  # after the others had left their last boundary
                assert member.harmed or self.scenario.rifts or came_too_late, (
                    f"{member.name} failed without a fault: {member.status}"
                )
            if member.status != "done" and self.scenario.name == "cuts":
                alone = [
                    values for _, values in member.outcomes.values() if any(len(v[1]) == 1 for v in values.values())
                ]
                assert not alone, f"{member.name} finished a call alone, cut off from the rendezvous server"
        for number in range(ROUNDS):
            self._check_call(number)
        if not any((self.scenario.freezes, self.scenario.cuts, self.scenario.rifts, self.scenario.restarts)):
            bound_s = AFTER_A_KILL_S * (1 + self.scenario.kills + self.scenario.joins)
            assert self.longest_view_change_s < bound_s, (
                f"a view change took {self.longest_view_change_s:.2f} s after a kill"
            )

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
            if member.status == "killed":
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
        member.poke()
        self._connect(member)

        def give_up() -> None:
            if not member.state.view.number:
                self.perform(member, member.state.leave(ViewChangeError, "no view included this member"))

        self.at(member, VIEW_CHANGE_S * 2, give_up)

    def _alive(self) -> list[Member]:
        return [member for member in self.members.values() if member.status == "running" and not member.frozen]

    def _victim(self) -> Member | None:
        alive = self._alive()
        return self._chance.choice(alive) if len(alive) > 1 else None

    def _kill(self) -> None:
        if member := self._victim():
            self.say(f"{member.name} is killed")
            member.status, member.harmed = "killed", True
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
            self._tear(world)

    def _restart(self) -> None:
        if self._coordinator is None:
            return
        self.say("the rendezvous is killed")
        self._coordinator = None
        self._tick_s = None
        for member in self.members.values():
            if member.status == "running" and member.linked:
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
        if member.status != "running":
            return
        if self._coordinator is None or member.cut:
            self.at(member, 0.3, lambda: self._connect(member))
            return
        resume = member.state.phase != "waiting"
        if resume and not self._coordinator.may_resume(member.name):
            self.at(member, self._moment(), lambda: self.perform(member, member.state.on_message(Evicted("given up"))))
            return
        member.linked = True
        info = MemberInfo(member.name, "host", 1)

        def arrive(server: Coordinator) -> list[coordinator.Action]:
            if not member.linked:
                return []
            if resume:
                self.at(member, self._moment(), lambda: self.perform(member, member.state.on_reconnected()))
            return server.on_join(info, self.now_s)

        self._decide_after(self._in_order(member, True), arrive)

    def _reconnect(self, member: Member) -> None:
        if member.status == "running":
            self._connect(member)
            self.at(member, VIEW_CHANGE_S, lambda: None if member.linked else self._sever(member))

    def _sever(self, member: Member) -> None:
        self.perform(member, member.state.on_rendezvous_lost("the rendezvous cannot be reached"))

    def _lose_link(self, member: Member, after_s: float) -> None:
        if not member.linked:
            return
        member.linked = False
        self._decide_after(after_s + self._moment(), lambda server: server.on_lost(member.name, self.now_s))
        self.at(member, after_s + self._moment(), lambda: self._reconnect(member))

    def _decide_after(self, delay_s: float, event: Callable[[Coordinator], list[coordinator.Action]]) -> None:
        """Let the coordinator handle an event later, unless it is killed before."""
        server = self._coordinator

        def happen() -> None:
            if server is not None and server is self._coordinator:
                self._decided(event(server))

        self.after(delay_s, happen)

    def _decided(self, actions: list[coordinator.Action]) -> None:
        for action in actions:
            match action:
                case Persist(view):
                    assert view.number > self.persisted.number, "view numbers only increase"
                    self.say(f"view {view.number}: {' '.join(view.ids())}, {view.committed} committed")
                    self.persisted = view
                case SendTo(name, message):
                    self._tell(self.members[name], message)
        self._set_tick()

    def _tell(self, member: Member, message: Message) -> None:
        if not member.linked:
            return
        server = self._coordinator
        copied = decode(encode(message))

        def heard() -> None:
            if member.linked and server is self._coordinator:
                self.perform(member, member.state.on_message(copied))

        self.at(member, self._in_order(member, False), heard)

    def _set_tick(self) -> None:
        due_s = self._coordinator.deadline_s if self._coordinator is not None else None
        if due_s is None or due_s == self._tick_s:
            return
        self._tick_s = due_s
        self._decide_after(due_s - self.now_s, lambda server: server.on_tick(self.now_s))

    # -- the driver of a member --------------------------------------------------------------------------------------------------

    def perform(self, member: Member, actions: Sequence[member_state.Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self._send(member, message)
                case CloseView():
                    self._down(member, "left")
                case FormView(view):
                    self._form(member, view)
                case EndMembership(_, reason):
                    self.say(f"{member.name} is out: {reason}")
                    member.fail(reason)
                    self._lose_link(member, 0)
        member.poke()

    def _send(self, member: Member, message: Message) -> None:
        if member.linked:
            self._decide_after(
                self._in_order(member, True),
                lambda server: server.on_message(member.name, message, self.now_s) if member.linked else [],
            )

    # -- the worlds of views -------------------------------------------------------------------------------------------------------------

    def _form(self, member: Member, view: View) -> None:
        world = self._worlds.setdefault(view.number, World(view))
        world.came.add(member.name)
        view_number = view.number
        self.at(member, FORM_S, lambda: self._failed(member, view_number) if member.name not in world.up else None)
        if world.down:
            self.at(member, self._moment(), lambda: self._failed(member, view_number))
        elif world.came == set(view.ids()) and not self._tear(world):
            for name in view.ids():
                self.at(self.members[name], self._moment(), lambda name=name: self._up(self.members[name], world))  # type: ignore[misc]

    def _up(self, member: Member, world: World) -> None:
        if not world.down and member.state.phase == "forming" and member.state.view.number == world.view.number:
            world.up.add(member.name)
            self.say(f"{member.name} is ready in view {world.view.number}")
            member.state.on_formed(world.view.number)
            member.poke()

    def _failed(self, member: Member, view_number: int, suspect: str = "") -> None:
        if member.state.view.number == view_number and member.status != "killed":
            self.perform(member, member.state.on_failed(view_number, suspect))

    def _down(self, member: Member, cause: str) -> None:
        """A member is lost from the world of its view, and each other member detects it at its own time."""
        world = self._worlds.get(member.state.view.number)
        if world is None or world.down or member.name not in world.came:
            return
        world.down = True
        suspect = member.name if cause != "left" else ""
        for name in sorted(world.came - {member.name}):
            other = self.members[name]
            self.at(other, self._moment(), lambda other=other: self._failed(other, world.view.number, suspect))  # type: ignore[misc]

    def _tear(self, world: World) -> bool:
        """Break the world if two of its members cannot reach each other. Returns whether they cannot.

        Rank 0 and each other member monitor each other; two others that lose their connection cannot name the failed one.
        """
        pair = next((pair for pair in self._rifts if pair <= set(world.view.ids())), None)
        if pair is None or world.down:
            return False
        world.down = True
        first = world.view.ids()[0]
        for name in sorted(world.came):
            suspect = next(iter(pair - {name})) if first in pair and name in pair else ""
            other = self.members[name]
            self.at(other, SILENCE_S + self._moment(), lambda o=other, a=suspect: self._failed(o, world.view.number, a))  # type: ignore[misc]
        return True

    def take_part(self, member: Member, view_number: int, key: object, part: Any) -> None:
        """Start an operation. When all members have, it completes at each one at its own time, unless its view ends there before."""
        world = self._worlds[view_number]
        parts = world.parts.setdefault(key, {})
        assert member.name not in parts, f"{member.name} takes part in {key} twice"
        parts[member.name] = part
        if parts.keys() == set(world.view.ids()):
            ranked = {name: parts[name] for name in world.view.ids()}
            for name in ranked:
                other = self.members[name]
                self.at(other, self._moment(), lambda other=other: self._complete(other, view_number, key, ranked))  # type: ignore[misc]

    def _complete(self, member: Member, view_number: int, key: object, ranked: dict[str, Any]) -> None:
        if member.state.is_in(view_number):
            member.results[key] = ranked
            member.poke()


def replay(name: str, seed: int) -> list[str]:
    """Run one schedule. Returns its events. Raises AssertionError with notes that list them and tell how to reproduce it."""
    cluster = Cluster(next(each for each in SCENARIOS if each.name == name), seed)
    try:
        cluster.run()
    except Exception as error:
        for note in (*cluster.log, f"replay: python -m tests.simulation.elastic_cluster {name} {seed}"):
            error.add_note(note)
        raise
    return cluster.log


if __name__ == "__main__":
    print(*replay(sys.argv[1], int(sys.argv[2])), sep="\n")
