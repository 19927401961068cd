"""Programs written for pymultiworld run unchanged, as separate processes that know nothing else of this library."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.programs import free_port

PROGRAM = Path(__file__).with_name("pymultiworld_program.py")
REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 90.0

Start = Callable[..., "Program"]


class Program:
    """One process of a pymultiworld application. Its output goes to a file."""

    def __init__(self, folder: Path, index: int, *arguments: str) -> None:
        self._out, self._err = folder / f"{index}.out", folder / f"{index}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-u", str(PROGRAM), *arguments], stdout=out, stderr=err, cwd=REPOSITORY
            )

    @property
    def output(self) -> str:
        return self._out.read_text()

    @property
    def complaints(self) -> list[str]:
        """Its stderr without torch's own warnings."""
        return [line for line in self._err.read_text().splitlines() if "Warning" not in line and "NumPy" not in line]

    def prints(self, words: str) -> None:
        """Return once it has printed `words`."""
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.output:
            assert self.process.poll() is None, (self.output, self.complaints)
            assert time.monotonic() < deadline, f"{words!r} was not printed in {PATIENCE_S} s: {self.output}"
            time.sleep(0.02)

    def ended(self) -> int:
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Program] = []

    def start(*arguments: str) -> Program:
        running.append(Program(tmp_path, len(running), *arguments))
        return running[-1]

    yield start
    for program in running:
        program.process.kill()
        program.process.wait()


@pytest.mark.parametrize(
    ("leader_last", "more"),
    [(False, ("--own_ports", "--cleanup")), (True, ())],
    ids=["leader first, a port a world, cleanup", "leader last, one port, no cleanup"],
)
def test_every_operation_gives_its_result_in_two_worlds_of_three(
    start: Start, leader_last: bool, more: tuple[str, ...]
) -> None:
    common = ("--base", str(free_port()), *more)
    members = [("--worldinfo", f"{world},{rank}") for world in (2, 1) for rank in (2, 1)]
    leader = ("--worldinfo", "1,0", "--worldinfo", "2,0")
    programs = [start(*each, *common) for each in ([*members, leader] if leader_last else [leader, *members])]
    for program in programs:
        assert program.ended() == 0, program.complaints
        assert program.complaints == []
        assert program.output.endswith("got to the end\n")
        assert "caught" not in program.output
    spoken = programs[-1 if leader_last else 0].output
    for world in ("world1", "world2"):
        assert f"done with step: 3 in {world}" in spoken
        assert spoken.count(f"rank: 0 from {world} has reduced tensor: tensor([6.])") == 3
        assert f"rank: 0 from {world} has reduced to root: tensor([6., 6., 6.])" in spoken
        assert f"received tensor([2]) from rank 2 in {world}" in spoken
        gathered = "[tensor([0., 0., 0.]), tensor([1., 1., 1.]), tensor([2., 2., 2.])]"
        assert f"rank: 0 from {world} has gathered tensors: {gathered}" in spoken
    member = programs[0 if leader_last else 1].output  # rank 2 of world2
    assert "rank: 2 from world2 recieves tensor: tensor([7., 7., 7.])" in member
    assert "rank: 2 from world2 has tensor: tensor([2., 2., 2.])" in member
