"""Every example runs through the launcher with one rank killed."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 300.0
STEPS = 100
KILLED_AFTER = 3
OF_ALL_RANKS = [torch.full((3,), 1000.0 + rank) for rank in range(3)]
# What one member of the intact world prints in the last step: (name, output).
LAST_RESULTS = {
    "send_recv": ("leader", "rank: 0 received tensor([1002., 1002., 1002.]) from rank 2 in world2"),
    "broadcast": ("world2 rank 2", "rank: 2 from world2 has broadcast tensor: tensor([1000., 1000., 1000.])"),
    "reduce": ("leader", "rank: 0 from world2 has reduced tensor: tensor([3003., 3003., 3003.])"),
    "all_reduce": ("world2 rank 1", "rank: 1 from world2 has reduced tensor: tensor([3003., 3003., 3003.])"),
    "all_gather": ("world2 rank 2", f"rank: 2 from world2 has gathered tensors: {OF_ALL_RANKS}"),
    "gather": ("leader", f"rank: 0 from world2 has gathered tensors: {OF_ALL_RANKS}"),
    "scatter": ("world2 rank 2", "rank: 2 from world2 has tensor: tensor([1002., 1002., 1002.])"),
    "reduce_scatter": ("world2 rank 2", "rank: 2 from world2 has reduced part: tensor([30036., 30036., 30036.])"),
    "all_to_all": (
        "world2 rank 1",
        "rank: 1 from world2 has received tensors: "
        "[tensor([10001., 10001., 10001.]), tensor([10011., 10011., 10011.]), tensor([10021., 10021., 10021.])]",
    ),
    "ring_all_reduce": (
        "world2 rank 2",
        "rank: 2 from world2 has reduced tensor: tensor([3003., 6006., 9009.]), as all_reduce has",
    ),
}


class Launcher:
    """Runs `python -m examples.launch` with these arguments and reads its output."""

    def __init__(self, *arguments: str) -> None:
        command = (sys.executable, "-m", "examples.launch", *arguments)
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines: list[str] = []

    def read(self) -> Iterator[str]:
        """New lines of output. Ends with the launcher, at the latest after PATIENCE_S."""
        assert self.process.stdout is not None
        alarm = threading.Timer(PATIENCE_S, self.process.kill)
        alarm.start()
        try:
            for line in self.process.stdout:
                self.lines.append(line.rstrip("\n"))
                yield self.lines[-1]
        finally:
            alarm.cancel()

    def read_until(self, text: str) -> str:
        """The first new line that matches this regular expression."""
        for line in self.read():
            if re.search(text, line):
                return line
        return pytest.fail(f"the launcher ended without {text!r}:\n" + "\n".join(self.lines))

    def close(self) -> None:
        """End the launcher and its ranks if they still run."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # a launcher that ignores the interrupt is killed
            raise


Said = dict[str, list[str]]
"""The output of each rank, and the launcher's final line."""


@pytest.fixture(scope="module")
def sections() -> dict[str, Said]:
    """The output of each example, which one launcher runs in sequence."""
    examples = (*LAST_RESULTS, "single_world")
    launcher = Launcher(
        *examples,
        *("--steps", str(STEPS), "--step-pause-s", "0", "--kill-rank", "1,2", "--after-step", str(KILLED_AFTER)),
    )
    found: dict[str, Said] = {example: defaultdict(list) for example in examples}
    try:
        for example in examples:
            start = len(launcher.lines)
            launcher.read_until(rf"^launcher +\| {example}: ")
            for line in launcher.lines[start:]:
                label, _, text = line.partition("|")
                found[example][label.strip()].append(text.removeprefix(" "))
    finally:
        launcher.close()
    return found


def steps_done(lines: list[str], world: str) -> list[int]:
    return [
        int(line.split()[3]) for line in lines if line.startswith("done with step: ") and line.endswith(f"({world})")
    ]


@pytest.mark.parametrize("example", LAST_RESULTS)
def test_other_world_completes_all_steps_when_a_rank_is_killed(example: str, sections: dict[str, Said]) -> None:
    said = sections[example]
    assert said["world1 rank 2"][-1] == "killed by SIGKILL"
    assert steps_done(said["world1 rank 2"], "world1") == list(range(1, KILLED_AFTER + 1))
    for survivor in ("leader", "world1 rank 1"):
        assert any(line.startswith("caught an exception: world1 broken: rank 2, cause exit") for line in said[survivor])
        assert STEPS not in steps_done(said[survivor], "world1")
    assert said["world1 rank 1"][-1] == "ended with status 1"
    for member in ("leader", "world2 rank 1", "world2 rank 2"):
        assert steps_done(said[member], "world2") == list(range(1, STEPS + 1))
        assert f"world2: finished all {STEPS} steps" in said[member]
        assert said[member][-1] == "ended with status 0"
    who, result = LAST_RESULTS[example]
    assert result in said[who]
    assert said["launcher"] == [f"{example}: done"]


def answers_of(lines: list[str]) -> dict[str, set[str]]:
    """The workers' answers for each image."""
    answers, picture = defaultdict(set), ""
    for line in lines:
        if sent := re.search(r"^leader .*Sent (\S+) to", line):
            picture = sent[1]
        elif predicted := re.search(r"^leader .*Predicted class: (.*)", line):
            answers[picture].add(predicted[1])
    return dict(answers)


def test_resnet_skips_a_killed_worker_until_it_rejoins_and_ctrl_c_ends_all() -> None:
    launcher = Launcher(
        *("resnet", "--num_workers", "2", "--weights", "random:0", "--steps", "1000000", "--step-pause-s", "0.01"),
        *("--kill-rank", "1,1", "--after-step", "2", "--restart-after-s", "0.1"),
    )  # fmt: skip
    try:
        launcher.read_until(r"^leader .*skipped world1 .*world1 broken: rank 1, cause exit")
        launcher.read_until(r"^leader .*Sent \w+.jpg to world2")
        launcher.read_until(r"^leader .*world1 joined, generation 2")
        launcher.read_until(r"^leader .*Sent \w+.jpg to world1")
        launcher.read_until(r"^leader .*Predicted class: ")
        launcher.process.send_signal(signal.SIGINT)
        launcher.read_until(r"^launcher .*resnet: ended all ranks")
        assert launcher.process.wait(PATIENCE_S) == 130
        started = [int(pid) for line in launcher.lines for pid in re.findall(r"started as process (\d+)", line)]
        assert len(started) == 4
        assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
        answers = answers_of(launcher.lines)
        assert set(answers) == {"china.jpg", "flower.jpg"}
        assert [len(labels) for labels in answers.values()] == [1, 1], f"the workers do not agree: {answers}"
    finally:
        launcher.close()


@pytest.mark.parametrize(("example", "victim"), [("all_reduce_with_retry", 0), ("all_reduce_by_hand", 2)])
def test_elastic_example_continues_with_correct_sums_and_the_killed_rank_rejoins(example: str, victim: int) -> None:
    launcher = Launcher(
        example,
        *("--steps", "1000000", "--step-pause-s", "0.05", "--kill-rank", f"1,{victim}", "--after-step", "3"),
        *("--restart-after-s", "0.1"),
    )
    try:
        # With no free core, another member may miss a step as well.
        launcher.read_until(rf"^member {victim} .*joined view (?!1 )\d+ as rank \d of 4")
        launcher.read_until(rf"^member {victim} .*has sums \[1111\] of 4 members, 0 retries")
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.process.wait(PATIENCE_S) == 130
    finally:
        launcher.close()
    said = [line.partition("| ")[2] for line in launcher.lines]
    sums: dict[tuple[str, str], set[str]] = defaultdict(set)
    for found in re.finditer(r"member (\d) has sums \[(.*?)\] of (\d) members", "\n".join(said)):
        sums[found[1], found[3]] |= set(found[2].split(", "))
    assert any("killed by SIGKILL" in line for line in launcher.lines)
    three = str(1111 - 10**victim)
    for survivor in {"0", "1", "2", "3"} - {str(victim)}:
        assert sums[survivor, "4"] == {"1111"}
        assert three in sums[survivor, "3"] <= {three, "1111"}, "a sum that four members had finished is not repeated"


@pytest.mark.parametrize("victim", [0, 2])
def test_training_continues_with_equal_weights_when_a_member_is_killed_in_a_backward_pass(victim: int) -> None:
    survivors = {"0", "1", "2", "3"} - {str(victim)}
    launcher = Launcher(
        "data_parallel",
        *("--steps", "1000000", "--step-pause-s", "0.01", "--kill-rank", f"1,{victim}", "--after-step", "3"),
    )
    try:
        for survivor in survivors:
            if not any(re.search(rf"^member {survivor} .*done with step: 8 ", line) for line in launcher.lines):
                launcher.read_until(rf"^member {survivor} .*done with step: 8 ")
    finally:
        launcher.close()
    output = "\n".join(launcher.lines)
    broken = re.findall(
        rf"^member (\d) .*caught an exception: .* broken: rank {victim}, cause exit", output, re.MULTILINE
    )
    assert set(broken) == survivors
    weights, done = defaultdict(set), r"^member (\d) .*done with step: (\d+) \((\d) members, weights (\w+)\)"
    for _, step, members, digest in re.findall(done, output, re.MULTILINE):
        weights[int(step), int(members)].add(digest)
    assert {(1, 4), (8, 3)} <= set(weights)
    assert [len(each) for each in weights.values()] == [1] * len(weights)


def test_ensemble_answers_every_image_when_one_model_is_killed() -> None:
    launcher = Launcher(
        "ensemble",
        *("--models", "resnet18", "--steps", "5", "--step-pause-s", "0", "--kill-rank", "1,0", "--after-step", "3"),
    )
    try:
        lines = list(launcher.read())
        assert launcher.process.wait(PATIENCE_S) == 0, "\n".join(lines[-60:])
    finally:
        launcher.close()
    assert any(re.search(r"^member 0 .*killed by SIGKILL", line) for line in lines)
    answers = re.findall(r"^client .*\.jpg shows (.*) \(.*\), average of (\d) models$", "\n".join(lines), re.MULTILINE)
    assert [models for _, models in answers[:2]] == ["4", "4"]
    assert len(answers) == 5
    assert [models for _, models in answers[3:]] == ["3", "3"]
    for number in (1, 2, 3):
        assert any(re.search(rf"^member {number} .*finished all 5 steps", line) for line in lines)
