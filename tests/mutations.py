"""Plants known bugs in a copy of the project, one at a time, and runs the tests that should find them: python -m tests.mutations [PART ...]

Each PART selects the bugs whose path contains it. Exits with status 1 if a bug survives, or if its text is not in the file any more.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SCHEDULING = ("tests/unit/scheduling", "tests/simulation/test_simulation.py")
REPLICAS = (
    "tests/unit/scheduling",
    "tests/unit/server/test_version_change.py",
    "tests/integration/test_join_requests.py",
)
LIBRARY = ("tests/unit/library", "tests/integration/test_worlds_[jmp]*.py", "tests/integration/test_worlds_[lr]*.py")
FRONTENDS = (
    "tests/unit/server/test_leader_pool*.py",
    "tests/unit/server/test_frontend*.py",
    "tests/chaos/test_faults.py",
)
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Mutation:
    """A bug: `old`, which occurs once in the file, becomes `new`. `tests` are run until one fails; the cheap ones are first."""

    path: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    # A replica survives one failure too many.
    Mutation(
        "server/scheduling/scheduler.py",
        "unmatched_failures >= _MAX_UNMATCHED_FAILURES",
        "unmatched_failures > _MAX_UNMATCHED_FAILURES",
        SCHEDULING,
    ),
    # The former holder of an input is not told that it may forget it.
    Mutation("server/scheduling/batches.py", "del previous.held[self.id]", "pass", SCHEDULING),
    # The timer of an idle replica goes on: it is failed as hung.
    Mutation(
        "server/scheduling/state.py",
        "        else:\n            self.hang_deadlines.discard(replica)\n        return worked_s",
        "        return worked_s",
        SCHEDULING,
    ),
    # A request is blamed for the end of a draining replica.
    Mutation(
        "server/scheduling/failure_handling.py",
        'cause != "left" and not replica.draining',
        'cause != "left"',
        SCHEDULING,
    ),
    # The pool of a cancelled batch is not dispatched.
    Mutation(
        "server/scheduling/batch_lifecycle.py",
        "        batch.pool.dequeue(batch)\n        self._state.changed_pools[batch.pool] = None\n",
        "        batch.pool.dequeue(batch)\n",
        SCHEDULING,
    ),
    # A batch is hedged again and again.
    Mutation(
        "server/scheduling/dispatcher.py",
        "len(attempt.batch.in_flight) == 1 and",
        "len(attempt.batch.in_flight) >= 1 and",
        SCHEDULING,
    ),
    # The queue takes one request too many.
    Mutation(
        "server/scheduling/admission.py",
        "waiting >= self._state.config.queue_limit",
        "waiting > self._state.config.queue_limit",
        SCHEDULING,
    ),
    # A request that starts again goes to the end of its group.
    Mutation(
        "server/scheduling/state.py",
        "            self._groups[request.group].move_to_end(request.id, last=False)\n",
        "",
        SCHEDULING,
    ),
    # The second failure in a row has no consequence.
    Mutation("server/replicas/breaker.py", "record.failures > 1", "record.failures > 2", REPLICAS),
    # A worker may report the same kept output twice.
    Mutation(
        "server/replicas/reply_validator.py",
        "(MessageKind.RESULT, MessageKind.KEPT, MessageKind.FAILED",
        "(MessageKind.RESULT, MessageKind.FAILED",
        REPLICAS,
    ),
    # Only the first output is released after a while.
    Mutation(
        "server/replicas/released_outputs.py",
        "            self._timer.cancel()\n            self._timer = None\n",
        "            self._timer.cancel()\n",
        REPLICAS,
    ),
    # The slot of a lost worker is removed although another worker has taken it.
    Mutation("server/replicas/registry.py", "if slot.link is lost:", "if slot.link is not None:", REPLICAS),
    # The only ready replica of a stage is moved to another stage.
    Mutation("server/replicas/placement.py", "self._ready_in(stage) > 1", "self._ready_in(stage) > 0", REPLICAS),
    # The second cause of an end replaces the first.
    Mutation(
        "server/replicas/worker_link.py",
        '        if self.state == "broken":\n            return\n        self.cause, self.detail',
        "        self.cause, self.detail",
        REPLICAS,
    ),
    # A silent member is found too late.
    Mutation(
        "multiworld/membership/monitor.py",
        "if silent_s > self._heartbeat.timeout_s",
        "if silent_s > 8 * self._heartbeat.timeout_s",
        LIBRARY,
    ),
    # Rank 0 does not wait for its own operations before all connections close.
    Mutation(
        "multiworld/membership/monitor.py",
        "self._drained >= {self.member.rank, *self.connections}",
        "self._drained >= {*self.connections}",
        LIBRARY,
    ),
    # A data connection of another formation of the world is accepted.
    Mutation(
        "multiworld/membership/mesh.py",
        "if not self.formation or hello.formation != self.formation",
        "if not self.formation",
        LIBRARY,
    ),
    # A wait for a key is not woken by the end of the world.
    Mutation(
        "multiworld/membership/store.py",
        "            self._values.clear()\n            self._changed.notify_all()\n",
        "            self._values.clear()\n",
        LIBRARY,
    ),
    # The end of a world removes the next generation.
    Mutation(
        "multiworld/membership/acceptor.py",
        "self._sessions.get(session.member.world) is session",
        "self._sessions.get(session.member.world) is not None",
        LIBRARY,
    ),
    # A member that has connected connects once more.
    Mutation(
        "multiworld/membership/member.py",
        "        self._connecting = None\n        if self._retry_timer is not None:\n            self._retry_timer.cancel()\n"
        "\n    def _retry",
        "        self._connecting = None\n\n    def _retry",
        LIBRARY,
    ),
    # A frame is written between a partly written head and its message.
    Mutation(
        "multiworld/transport/connection.py",
        "if at and self._outbox[0].joined:",
        "if at and not self._outbox:",
        LIBRARY,
    ),
    # A piece overwrites one that the receiver has not read.
    Mutation(
        "multiworld/transport/shared.py",
        "self._pieces_sent - self._pieces_done >= SLOTS",
        "self._pieces_sent - self._pieces_done > SLOTS",
        LIBRARY,
    ),
    # A segment that the receiver has released is never used again.
    Mutation(
        "multiworld/transport/shared.py",
        "        self._pool.release(segment)\n        if operation is not None:\n            self._owner",
        "        if operation is not None:\n            self._owner",
        LIBRARY,
    ),
    # A segment is used again while its receiver reads it.
    Mutation(
        "multiworld/transport/segments.py",
        "if segment.owned or segment.leases or segment.address",
        "if segment.owned or segment.address",
        LIBRARY,
    ),
    # Descriptors that arrived for a message stay open when the connection ends.
    Mutation(
        "multiworld/transport/shared.py",
        "        for fd in self._fds:\n            os.close(fd)\n        self._fds.clear()\n",
        "        self._fds.clear()\n",
        LIBRARY,
    ),
    # A request that has ended two leaders is sent to a third one.
    Mutation(
        "server/frontends/leader_pool.py",
        "if failures >= _MAX_LEADER_FAILURES:",
        "if failures > _MAX_LEADER_FAILURES:",
        FRONTENDS,
    ),
    # A withdrawn request is computed to its end.
    Mutation(
        "server/frontends/leader_link.py",
        "if future.cancelled() or not future.done():",
        "if future.cancelled() and not future.done():",
        FRONTENDS,
    ),
    # A draining leader waits although its last request has ended.
    Mutation(
        "server/frontends/leader_pool.py",
        "                self._admitted -= 1\n                self._idle.set()\n",
        "                self._admitted -= 1\n",
        FRONTENDS,
    ),
    # An operation does not notice the loss of its leader.
    Mutation(
        "server/frontends/leader_link.py",
        "            steps.put_nowait(Frame(FrameKind.REJECTED, 0))\n",
        "            pass\n",
        FRONTENDS,
    ),
    # The leader waits for a frontend that is lost.
    Mutation(
        "server/frontends/sessions.py",
        "                _complete(pending, None)\n",
        "                pass\n",
        FRONTENDS,
    ),
)


def _copy(folder: Path) -> None:
    """Copy the files that git knows, and new ones."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], text=True)
    for name in filter(None, listed.split("\0")):
        source, target = Path(name), folder / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def _first_failure(folder: Path, tests: tuple[str, ...]) -> str | None:
    """The test that fails, or TIMEOUT; None if all pass."""
    for pattern in tests:
        files = sorted(str(path.relative_to(folder)) for path in folder.glob(pattern))
        if not files:
            return f"STALE: no tests at {pattern}"
        command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "--no-header", "--tb=no", *files]
        try:
            run = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "TIMEOUT"
        if run.returncode:
            lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return lines[0] if lines else f"STALE: the tests did not run: {run.stdout[-300:]}"
    return None


def main(parts: list[str]) -> int:
    chosen = [each for each in MUTATIONS if not parts or any(part in each.path for part in parts)]
    outcomes = dict.fromkeys(("found", "survived", "stale"), 0)
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder = Path(name)
        _copy(folder)
        for mutation in chosen:
            started_s, file = time.monotonic(), folder / mutation.path
            text = file.read_text() if file.exists() else ""
            outcome, detail = "stale", ""
            if text.count(mutation.old) == 1:
                file.write_text(text.replace(mutation.old, mutation.new))
                found = _first_failure(folder, mutation.tests)
                file.write_text(text)
                outcome, detail = ("found", found) if found else ("survived", "")
                if detail.startswith("STALE"):
                    outcome = "stale"
            outcomes[outcome] += 1
            what = mutation.old.strip().splitlines()[0]
            print(f"{outcome:8s} {time.monotonic() - started_s:5.0f} s {mutation.path}: {what}  {detail}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    return 1 if outcomes["survived"] or outcomes["stale"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
