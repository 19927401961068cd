"""Observations of a service: answers, its status page, its processes and connections."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import httpx
import pytest
from PIL import Image

from multiworld_serving.common.config import UserError
from multiworld_serving.testing.chaos.campaign import inject, left_out
from multiworld_serving.testing.chaos.faults import BY_NAME
from multiworld_serving.testing.chaos.faults.context import FaultContext
from multiworld_serving.testing.chaos.observer import Outage, Replica, Snapshot, outages, parse_status
from multiworld_serving.testing.chaos.system import system_under_test
from multiworld_serving.testing.chaos.system.network import drop_rules
from multiworld_serving.testing.chaos.system.processes import Connection, Process, parent, resources
from multiworld_serving.testing.chaos.system.system_under_test import RunningService
from multiworld_serving.testing.load.clients import ReferenceRequest, count_indistinguishable
from multiworld_serving.testing.load.images import image_file, photo
from multiworld_serving.testing.local_service import metric_sum

QUESTION = ReferenceRequest(b"", expected={1: 0.5, 2: 0.3, 3: 0.1})


def says(**probabilities: float) -> dict[str, object]:
    return {"predictions": [{"class_id": int(name[1:]), "probability": p} for name, p in probabilities.items()]}


def replica(state: str, slot: int = 0, generation: int = 1, stage: int = 0) -> Replica:
    return Replica(stage, slot, state, generation, f"local-{slot}", None, None)


def at(at_s: float, *replicas: Replica) -> Snapshot:
    return Snapshot(at_s, {each.key: each for each in replicas})


def test_answer_is_right_when_it_differs_by_rounding() -> None:
    assert QUESTION.find_mismatch(says(c1=0.5001, c2=0.2999, c3=0.1)) == ""


def test_answer_is_right_when_classes_of_equal_probability_are_swapped() -> None:
    assert QUESTION.find_mismatch(says(c1=0.5, c2=0.3, c4=0.1)) == ""


@pytest.mark.parametrize("answer", [says(c1=0.4, c2=0.4, c3=0.1), says(c7=0.5, c8=0.3, c9=0.1), says()])
def test_answer_is_wrong_when_it_belongs_to_another_image(answer: dict[str, object]) -> None:
    assert QUESTION.find_mismatch(answer).startswith("wrong answer")


def test_images_with_equal_answers_are_reported() -> None:
    assert count_indistinguishable([QUESTION, QUESTION, ReferenceRequest(b"", expected={1: 0.9})]) == 1


def test_photo_depends_on_the_seed_only() -> None:
    assert photo(1) == photo(1) != photo(2)
    with Image.open(BytesIO(photo(1, 200, 100))) as image:
        assert (image.format, image.size) == ("JPEG", (200, 100))


def test_invalid_image_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_text("text")
    with pytest.raises(UserError, match=r"--image .*a\.jpg"):
        image_file(tmp_path / "a.jpg")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.gif")
    with pytest.raises(UserError, match="is GIF, expected one of JPEG"):
        image_file(tmp_path / "a.gif")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert image_file(tmp_path / "a.png")[1] == "image/png"


def test_snapshot_is_parsed_from_the_status() -> None:
    failure = {"cause": "hang", "detail": "", "at_unix_s": 12.5}
    page = {"slot": 1, "state": "warming", "generation": 3, "worker": "a", "last_failure": failure}
    now = parse_status({"uptime_s": 3.0, "stages": [{"index": 2, "replicas": [page]}]}, 13.0)
    assert now.replicas[2, 1] == Replica(2, 1, "warming", 3, "a", "hang", 12.5)
    assert not now.complete
    assert now.stages_without_replica == {2}
    assert (now.ready, now.leader_since_s) == (0, 10.0)


def test_service_is_complete_only_with_all_leaders() -> None:
    slot = {"slot": 0, "state": "ready", "generation": 1, "worker": "a", "last_failure": None}
    status = {"uptime_s": 3.0, "stages": [{"index": 0, "replicas": [slot]}]}
    first, second, lost = (
        {"address": f"127.0.0.1:{8001 + number}", "state": state, "pid": number, "uptime_s": 3.0}
        for number, state in ((1, "ready"), (2, "ready"), (2, "unreachable"))
    )
    both = parse_status({**status, "leaders": [first, second]}, 13.0)
    one = parse_status({**status, "leaders": [first, lost]}, 13.0)
    assert (both.complete, one.complete) == (True, False)
    assert one.differs_from(both)


def test_moments_differ_when_the_leader_was_restarted() -> None:
    before = Snapshot(10.0, {}, leader_since_s=1.0)
    assert not Snapshot(20.0, {}, leader_since_s=1.5).differs_from(before)
    assert Snapshot(20.0, {}, leader_since_s=18.0).differs_from(before)
    assert at(10.0, replica("ready")).differs_from(at(9.0, replica("broken")))


@pytest.mark.parametrize(
    ("later", "broken"),
    [
        (replica("ready"), False),
        (replica("draining"), False),
        (replica("broken"), True),
        (replica("ready", generation=2), True),
    ],
)
def test_replica_is_broken_when_it_is_in_another_world_or_in_none(later: Replica, broken: bool) -> None:
    assert later.broken_since(replica("ready")) is broken


def test_outage_lasts_while_no_replica_of_the_stage_is_ready() -> None:
    up, down = replica("ready"), replica("broken")
    other, other_down = replica("ready", slot=1), replica("broken", slot=1)
    snapshots = [
        at(0, up, other),
        at(1, down, other),
        at(2, down, other_down),
        at(5, up, other_down),
        at(6, down, other_down),
    ]
    assert outages(snapshots) == [Outage(0, 2, 5), Outage(0, 6, 6)]


def test_metric_is_the_sum_of_its_series() -> None:
    text = '# HELP a_total x\na_total{stage="0"} 2.0\na_total{stage="1"} 3.5\na_total_more 9\nb 1\n'
    assert (metric_sum(text, "a_total"), metric_sum(text, "b"), metric_sum(text, "c")) == (5.5, 1.0, 0.0)


def test_processes_of_a_running_service_are_those_of_its_status_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here, own = socket.gethostname(), os.getpid()
    status = {
        "stages": [{"replicas": [_part("local-0", here, 11), _part("far", "elsewhere", 12), _part(None, None, None)]}],
        "spares": [_part("vm-13", here, 13)],
        "leaders": [_part("leader-1", here, own), _part("leader-2", here, None), _part("own-name", here, own)],
        "frontends": [_part("frontend-0", "elsewhere", own)],
    }
    lost = [httpx.ReadError("the frontend was killed")]

    def get(url: str, **_: object) -> httpx.Response:
        if lost:
            raise lost.pop()
        return httpx.Response(200, json=status)

    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.setattr(system_under_test, "_supervisor", {own: 99}.get)
    service = RunningService("http://x")
    assert service.worker_pids() == {"local-0": 11, "vm-13": 13}
    assert (service.child_pids("leader"), service.child_pids("frontend")) == ({1: own}, {})
    assert service.pid == 99
    assert RunningService("http://x", pid=5).pid == 5


def _part(name: str | None, host: str | None, pid: int | None) -> dict[str, object]:
    return {"name": name, "worker": name, "host": host, "pid": pid}


def test_parent_counts_only_if_it_is_serve() -> None:
    sleep = [sys.executable, "-c", "import subprocess, sys; subprocess.run(['sh', '-c', 'echo $$; read x'])", "serve"]
    with subprocess.Popen(sleep, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert system_under_test._supervisor(child) == process.pid
        assert system_under_test._supervisor(process.pid) is None, "its parent runs the tests"
        process.communicate("\n")


def test_left_out_faults_are_one_line_by_reason() -> None:
    assert left_out({"a": "no root", "b": "no leader", "c": "no root"}) == "left out: a, c (no root); b (no leader)"


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_process_is_stopped_during_a_freeze(sleeper: "subprocess.Popen[bytes]") -> None:
    with Process(sleeper.pid) as process:
        with process.stopped():
            while state(sleeper.pid) != "T":  # bounded by the test's own timeout
                time.sleep(0.01)
        while state(sleeper.pid) == "T":
            time.sleep(0.01)
        assert resources(sleeper.pid).threads == 1


def test_ended_process_is_not_signaled(sleeper: "subprocess.Popen[bytes]") -> None:
    with Process(sleeper.pid) as process:
        sleeper.kill()
        sleeper.wait()
        with process.stopped():
            pass
        with pytest.raises(OSError, match=r"."):
            resources(sleeper.pid)


def test_memory_limit_of_a_process_is_restored(sleeper: "subprocess.Popen[bytes]") -> None:
    limits = Path(f"/proc/{sleeper.pid}/limits")
    before = limits.read_text()
    with Process(sleeper.pid) as process, process.without_memory():
        assert limits.read_text() != before
    assert limits.read_text() == before


def test_connections_of_a_process_are_its_open_ones() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server, Process(os.getpid()) as process:
            assert Connection(*client.getsockname(), *client.getpeername()) in process.connections()
            assert Connection(*server.getsockname(), *server.getpeername()) in process.connections()
    assert parent(os.getpid()) == os.getppid()


def test_rules_drop_packets_in_the_given_directions_including_new_connections() -> None:
    connection = Connection("10.0.0.1", 4000, "10.0.0.2", 8001)
    out = ["-s", "10.0.0.1", "--sport", "4000", "-d", "10.0.0.2", "--dport", "8001"]
    back = ["-s", "10.0.0.2", "--sport", "8001", "-d", "10.0.0.1", "--dport", "4000"]

    def has(rules: list[list[str]], part: list[str]) -> bool:
        return any(part == rule[2:-2] for rule in rules)

    for direction, goes, comes in (("both", True, True), ("from", True, False), ("to", False, True)):
        rules = drop_rules([connection], direction)  # type: ignore[arg-type]
        assert (has(rules, out), has(rules, back)) == (goes, comes)
        assert any("--syn" in rule or "SYN,ACK" in rule for rule in rules)


class QuietObserver:
    """A service whose state never changes."""

    def __init__(self, *replicas: Replica) -> None:
        self.snapshots = [at(0.0, *replicas)]
        self.now = self.snapshots[0]

    def metric(self, name: str) -> float:
        return 0.0

    def wait(self, wanted: object, timeout_s: float, what: str) -> Snapshot:
        return self.now


def test_injection_is_unexpected_when_its_target_has_ended() -> None:
    class NoWorkers:
        url, pid = "", None

        def worker_pids(self) -> dict[str, int]:
            return {}

    target = replica("ready")
    context = FaultContext(NoWorkers(), QuietObserver(target), [target], 1.0, QUESTION)  # type: ignore[arg-type]
    injection = inject(BY_NAME["pause"], context)
    assert injection.unexpected[0].startswith("a target process had ended")
    assert injection.recovered
