"""Plants known bugs in a copy of the project, one at a time, and runs the tests that should find them: python -m tests.mutations [PART ...]

Each PART selects the bugs whose path contains it. Exits with status 1 if a bug survives, or before the first one if a text has changed.
"""

import shutil
import subprocess
import sys
import tempfile
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


BUGS: dict[tuple[str, ...], dict[str, tuple[tuple[str, str], ...]]] = {
    SCHEDULING: {
        "server/leader/scheduling/scheduler.py": (
            # A replica survives one failure too many.
            ("unmatched_failures >= _MAX_UNMATCHED_FAILURES", "unmatched_failures > _MAX_UNMATCHED_FAILURES"),
            # A batch is hedged again and again.
            ("if len(batch.in_flight) == 1:", "if len(batch.in_flight) >= 1:"),
        ),
        "server/leader/scheduling/batches.py": (
            # The former holder of an input is not told that it may forget it.
            ("del self.holder.held[self.id]", "pass"),
        ),
        "server/leader/scheduling/replica_table.py": (
            # The timer of an idle replica goes on: it is failed as hung.
            (
                "        if not replica.in_flight:\n            self.hang_deadlines.discard(replica)\n        elif was_first:",
                "        if replica.in_flight and was_first:",
            ),
        ),
        "server/leader/scheduling/backlog.py": (
            # A request that starts again goes to the end of its group.
            ("            self._by_key[request.key].move_to_end(request.id, last=False)\n", ""),
        ),
        "server/leader/scheduling/state.py": (
            # A request is blamed for the end of a draining replica.
            ('cause != "left" and replica.id not in self.table.draining', 'cause != "left"'),
        ),
        "server/leader/scheduling/admission.py": (
            # The queue takes one request too many.
            ("waiting >= state.config.queue_limit", "waiting > state.config.queue_limit"),
        ),
    },
    REPLICAS: {
        "server/leader/replicas/breaker.py": (
            # The second failure in a row has no consequence.
            ("record.failures > 1", "record.failures > 2"),
            # A worker that has served well is quarantined as if it had failed at once.
            ("record.failures = 1 if healthy else", "record.failures ="),
        ),
        "server/leader/replicas/reconcile.py": (
            # The last ready replica of a stage is moved to another stage.
            ("(placement.replicas[most] + 1 if count else 2)", "(placement.replicas[most] + 1 if count else 1)"),
            # All replicas of a stage load a version before one of them has passed the self-test.
            ("if stage in proven or stage not in busy_stages:", "if True:"),
            # A version serves although a worker has not loaded it.
            ("if not missing and all(version in worker.loaded for worker in ready):", "if not missing:"),
        ),
        "server/leader/replicas/registry.py": (
            # A former version stays while none of its batches is left.
            ("        self._versions.retiring = None\n        return True", "        return True"),
        ),
        "server/leader/replicas/placement.py": (
            # A worker whose slot another worker has taken is found there.
            ("return slot if slot is not None and slot.worker is worker else None", "return slot"),
        ),
        "server/leader/replicas/worker_link.py": (
            # An output of other rows than those of the stage is taken.
            ("if not expected.accepts(row_shape):", "if False:"),
            # Unused outputs are released only with the next batch.
            ("            elif self._release_timer is None:\n", "            elif self._unused is None:\n"),
        ),
    },
    LIBRARY: {
        "multiworld/membership/monitor.py": (
            # A silent member is found too late.
            ("if silent_s > self._heartbeat.timeout_s", "if silent_s > 8 * self._heartbeat.timeout_s"),
        ),
        "multiworld/membership/forming.py": (
            # A data connection of another formation of the world is accepted.
            ("if not ours.formation or hello.formation != ours.formation", "if not ours.formation"),
        ),
        "multiworld/collectives/nccl.py": (
            # An operation that torch's watchdog has aborted counts as successful.
            ("    if error != ErrorType.SUCCESS:", "    if False:"),
            # A group that connects is not aborted when its world ends.
            (
                "                self._group = self._make_group()  # `abort` may use it from here\n"
                "                self._connect_group(self._group)\n",
                "                group = self._make_group()\n"
                "                self._connect_group(group)\n"
                "                self._group = group\n",
            ),
        ),
        "multiworld/execution/store.py": (
            # A wait for a key is not woken by the end of the world.
            (
                "            self._values.clear()\n            self._changed.notify_all()\n",
                "            self._values.clear()\n",
            ),
        ),
        "multiworld/membership/acceptor.py": (
            # The end of a world removes the next generation.
            ("self._targets.get(target.key) is target", "self._targets.get(target.key) is not None"),
        ),
        "multiworld/transport/connection.py": (
            # A frame is written between a partly written head and its message.
            ("if at and self.outbox[0].joined:", "if at and not self.outbox:"),
        ),
        "multiworld/transport/queues.py": (
            # A peer may grant receive credits without a limit.
            ("if self._total_credits > MAX_CREDITS:", "if self._total_credits < 0:"),
        ),
        "multiworld/transport/shared.py": (
            # A sent piece overwrites a piece that the receiver has not read.
            ("self._pieces_sent - self._pieces_done >= SLOTS", "self._pieces_sent - self._pieces_done > SLOTS"),
            # A segment that the receiver has released is never used again.
            ("        self._pool.release(self._leases.pop(lease))\n\n", "        self._leases.pop(lease)\n\n"),
            # Descriptors that arrived for a message stay open when the connection ends.
            (
                "        for fd in self._fds:\n            os.close(fd)\n        self._fds.clear()\n",
                "        self._fds.clear()\n",
            ),
        ),
        "multiworld/transport/segments.py": (
            # A segment is used again while its receiver reads it.
            ("            segment.users += 1\n", "            pass\n"),
        ),
    },
    FRONTENDS: {
        "server/frontend/leaders/resending.py": (
            # A request that has ended two leaders is sent to a third one.
            ("if self._failures >= _MAX_LEADER_FAILURES:", "if self._failures > _MAX_LEADER_FAILURES:"),
        ),
        "server/frontend/leaders/pool.py": (
            # A draining leader waits although its last request has ended.
            ("        self.open_requests -= 1\n", "        pass\n"),
        ),
        "common/wire/link.py": (
            # A withdrawn request is computed to its end.
            ("if future.cancelled() or not future.done():", "if future.cancelled() and not future.done():"),
            # Nobody notices the loss of the other end.
            ("                take(lost)\n", "                pass\n"),
        ),
    },
}
"""By the tests that should find them, and by file: a text that occurs once there, and what it becomes. `tests` run until one fails."""


def _copy(folder: Path) -> None:
    """Copy the files that git knows, and new ones."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], text=True)
    for name in filter(None, listed.split("\0")):
        source, target = Path(name), folder / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def _first_failure(folder: Path, tests: tuple[str, ...]) -> str:
    """The test that fails, or TIMEOUT; empty if all pass. Raises SystemExit if they do not run."""
    for pattern in tests:
        files = [str(path.relative_to(folder)) for path in sorted(folder.glob(pattern))]
        command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "--no-header", "--tb=no", *files]
        try:
            run = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "TIMEOUT"
        failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if not files or (run.returncode and not failed):
            raise SystemExit(f"the tests {pattern} did not run: {run.stdout[-300:]}")
        if failed:
            return failed[0]
    return ""


def main(parts: list[str]) -> int:
    bugs = [
        (tests, path, old, new)
        for tests, files in BUGS.items()
        for path, texts in files.items()
        for old, new in texts
        if not parts or any(part in path for part in parts)
    ]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        folder = Path(name)
        _copy(folder)
        if stale := [(path, old) for _, path, old, _ in bugs if (folder / path).read_text().count(old) != 1]:
            raise SystemExit(f"these texts do not occur once in their files: {stale}")
        for tests, path, old, new in bugs:
            file = folder / path
            text = file.read_text()
            file.write_text(text.replace(old, new))
            failure = _first_failure(folder, tests)
            file.write_text(text)
            survived += not failure
            print(f"{'found' if failure else 'SURVIVED'} {path}: {old.strip().splitlines()[0]}  {failure}", flush=True)
    print(f"{survived} of {len(bugs)} bugs survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
