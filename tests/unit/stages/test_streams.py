"""How a worker computes the chunks of a stage that yields them."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from multiworld_serving.models.errors import StageSpecError
from multiworld_serving.models.stages import streams
from multiworld_serving.models.stages.api import InvalidInput, Request, Stage
from multiworld_serving.models.stages.local import LocalPipeline
from multiworld_serving.models.stages.objects import OBJECT_ROWS, ObjectError, StreamStep, encode, rows_of
from multiworld_serving.models.stages.stage import PythonStage, StageFailedError
from multiworld_serving.models.stages.streams import MAX_CHUNK_BYTES
from tests.unit.stages.pipelines import load

LOST, END, WAITING = "lost", "end", "waiting"


def chunk(value: Any) -> dict[str, Any]:
    return {"chunk": value}


def opening(stream: str, row: Any, sent: Sequence[Any] = (), idle_s: float = 100) -> StreamStep:
    return StreamStep(stream, "open", len(sent), idle_s, row, sent)


def following(stream: str, position: int, idle_s: float = 100) -> StreamStep:
    return StreamStep(stream, "next", position, idle_s)


def closing(stream: str) -> StreamStep:
    return StreamStep(stream, "close")


class Count(Stage):
    """Yields numbers from 0, and logs what ends its generators."""

    def setup(self, device: str) -> None:
        self.closed: list[int] = []

    def stream(self, row: Any) -> Iterator[Any]:
        return self.numbers(row, 0)

    def resume(self, row: Any, sent: list[Any]) -> Iterator[Any]:
        return self.numbers(row, sent[-1] + 1)

    def numbers(self, row: Any, first: int) -> Iterator[Any]:
        try:
            yield from range(first, row)
        finally:
            self.closed.append(row)


def made(stream: Callable[[Any, Any], Any], **others: Any) -> PythonStage:
    return PythonStage(type("Made", (Stage,), {"stream": stream} | others), "cpu", 8, is_first=True)


def computed(stage: PythonStage, *steps: Any) -> list[Any]:
    """The results as the frontend gets them; refusals as texts."""
    found = OBJECT_ROWS.decoded(stage.compute(rows_of([encode(each) for each in steps])))
    return [f"refused: {each}" if isinstance(each, InvalidInput) else each for each in found]


def closed(stage: PythonStage) -> list[Any]:
    """The rows whose generators have ended."""
    found: list[Any] = stage._stage._stage.closed
    return found


@pytest.fixture(autouse=True)
def turns_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results do not depend on the speed of the machine."""
    monkeypatch.setattr(streams, "_TURN_S", 1000.0)


@pytest.fixture
def stage() -> PythonStage:
    return PythonStage(Count, "cpu", 8, is_first=True)


def test_each_step_computes_one_chunk_and_streams_do_not_disturb_each_other(stage: PythonStage) -> None:
    assert computed(stage, opening("a", 2), opening("b", 3), opening("none", 0)) == [chunk(0), chunk(0), END]
    found = [computed(stage, following(name, position))[0] for position in (1, 2) for name in "ab"]
    assert found == [chunk(1), chunk(1), END, chunk(2)]
    assert computed(stage, following("b", 3), following("a", 2)) == [END, LOST]


def test_a_step_that_is_computed_twice_has_the_same_chunk_and_others_are_lost(stage: PythonStage) -> None:
    computed(stage, opening("a", 9))
    assert [computed(stage, following("a", position))[0] for position in (1, 1, 2, 2, 3)] == [
        *(chunk(1), chunk(1), chunk(2), chunk(2), chunk(3))
    ]
    assert computed(stage, following("a", 1), following("a", 5), following("b", 0)) == [LOST, LOST, LOST]
    assert computed(stage, following("a", 4)) == [chunk(4)]
    assert computed(stage, opening("a", 9)) == [chunk(0)]  # the request runs again


def test_a_batch_with_one_step_twice_computes_its_chunk_once(stage: PythonStage) -> None:
    computed(stage, opening("a", 9))
    assert computed(stage, following("a", 1), following("a", 1)) == [chunk(1), chunk(1)]
    assert computed(stage, following("a", 2)) == [chunk(2)]


def test_a_stream_is_resumed_behind_the_chunks_that_were_sent(stage: PythonStage) -> None:
    assert computed(stage, opening("a", 9, [0, 1, 2])) == [chunk(3)]
    assert computed(stage, following("a", 4)) == [chunk(4)]
    assert computed(stage, following("a", 1)) == [LOST]


def test_closing_and_idle_streams_end_their_generators(stage: PythonStage) -> None:
    computed(stage, opening("a", 5), opening("b", 6, idle_s=0.001), opening("c", 7))
    time.sleep(0.002)
    assert computed(stage, closing("a"), closing("unknown"), following("b", 1)) == [END, END, LOST]
    assert sorted(closed(stage)) == [5, 6]
    assert computed(stage, following("a", 1)) == [LOST]
    assert computed(stage, following("c", 1)) == [chunk(1)]


def test_an_exception_before_the_first_chunk_fails_the_batch_and_it_can_be_computed_again(stage: PythonStage) -> None:
    for _ in range(2):
        with pytest.raises(StageFailedError, match="raised TypeError"):
            computed(stage, opening("a", 5), opening("wrong", "text"), opening("b", 6))
    assert closed(stage) == ["text", "text"]
    assert computed(stage, opening("a", 5), opening("b", 6)) == [chunk(0), chunk(0)]
    assert closed(stage)[2:] == [5]  # the stream of the first attempt is replaced
    assert computed(stage, following("a", 1)) == [chunk(1)]


def test_a_later_exception_and_a_chunk_that_cannot_be_sent_end_only_their_stream() -> None:
    def stream(_: Any, row: Any) -> Iterator[Any]:
        yield "first"
        if row == "raise":
            raise ZeroDivisionError
        if row == "refuse":
            raise InvalidInput("not this")
        yield {"object": object, "long": b"x" * MAX_CHUNK_BYTES, "short": "second"}[row]

    rows = ["raise", "refuse", "object", "long", "short"]
    stage = made(stream)
    assert computed(stage, *(opening(row, row) for row in rows)) == [chunk("first")] * 5
    found = computed(stage, *(following(row, 1) for row in rows))
    whys = [f"the stage Made raised {name}" for name in ("ZeroDivisionError", "ObjectError", "ObjectError")]
    failed = [{"error": why} for why in whys]
    assert found == [failed[0], "refused: not this", *failed[1:], chunk("second")]
    assert computed(stage, following("raise", 1), following("short", 2)) == [LOST, END]


def test_a_refused_request_has_no_stream() -> None:
    def stream(_: Any, row: Any) -> Iterator[Any]:
        if row.text != "good":
            raise InvalidInput("only good ones")
        yield row.text

    found = computed(made(stream), opening("a", Request(b"bad")), opening("b", Request(b"good")))
    assert found == ["refused: only good ones", chunk("good")]
    typed = made(stream, request=int)
    assert computed(typed, opening("a", Request(b'"x"')))[0].startswith("refused: the body is invalid")


def test_slow_streams_take_turns_and_none_waits_forever(stage: PythonStage, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = dict.fromkeys("abc", 1)
    computed(stage, *(opening(name, 9) for name in positions))
    monkeypatch.setattr(streams, "_TURN_S", -1.0)  # as if each chunk took longer
    for served in "abcabcabc":
        found = computed(stage, *(following(name, at) for name, at in positions.items()))
        expected = {name: chunk(at) if name == served else WAITING for name, at in positions.items()}
        assert dict(zip(positions, found, strict=True)) == expected
        positions[served] += 1


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (["a", "b"], "ab"),
        ([b"a", b"b"], b"ab"),
        ([], []),
        ([{"n": 1}, "b"], [{"n": 1}, "b"]),
    ],
)
def test_a_row_that_is_no_stream_has_the_whole_response(chunks: list[Any], expected: Any, tmp_path: Path) -> None:
    assert computed(made(lambda _, __: iter(chunks)), "row") == [expected]
    text = f"""
        class First(Stage):
            def __call__(self, rows):
                return [each.text for each in rows]
        class Tell(Stage):
            def stream(self, row):
                for each in {chunks!r}:
                    yield each
            def example(self):
                return ["x"]
        pipeline = [First, Tell]
    """
    assert LocalPipeline(load(tmp_path, text, f"whole{abs(hash(str(chunks)))}.py")).result(Request(b"x")) == expected


def test_earlier_stages_compute_the_row_of_a_stream_and_refuse_it() -> None:
    def call(_: Any, rows: list[Any]) -> list[Any]:
        return [InvalidInput("no") if each == "bad" else each * 2 for each in rows]

    first = PythonStage(type("First", (Stage,), {"__call__": call}), "cpu", 8, is_first=False)
    found = computed(first, opening("a", "x", ["sent"]), 4, opening("b", "bad"))
    assert found == [opening("a", "xx", ["sent"]), 8, "refused: no"]


@pytest.mark.parametrize(
    "text",
    [
        "class A(Stage):\n    def stream(self, row): yield 1\nclass B(Stage): pass\npipeline = [A, B]",
        "class A(Stage):\n    def stream(self, row): yield 1\n    def __call__(self, rows): return rows\npipeline = [A]",
        "class A(Stage):\n    async def stream(self, row): yield 1\npipeline = [A]",
    ],
)
def test_a_stream_of_an_earlier_stage_and_a_second_call_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(StageSpecError, match=r"the stage A of .* has the method stream; expected it in the last stage"):
        load(tmp_path, text, f"refused{len(text)}.py").describe()


def test_bytes_that_are_no_step_are_refused() -> None:
    for wrong in (StreamStep("a", "other"), StreamStep("a", "next", "text")):  # type: ignore[arg-type]
        with pytest.raises(ObjectError):
            OBJECT_ROWS.decoded(rows_of([encode(wrong)]))
