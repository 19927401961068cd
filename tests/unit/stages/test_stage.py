"""How a worker computes stages in Python, and parts of bundles between them."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pydantic
import pytest
import torch
from torch import Tensor, nn

from multiworld_serving.models.export.exporter import ExportSettings, export_model
from multiworld_serving.models.export.trace import Dynamic
from multiworld_serving.models.stages.api import InvalidInput, Request, Stage
from multiworld_serving.models.stages.local import LocalPipeline
from multiworld_serving.models.stages.objects import OBJECT_ROWS, ObjectError, encode, rows_of
from multiworld_serving.models.stages.stage import PythonStage, StageFailedError
from tests.unit.stages.pipelines import load


def results(stage: type[Stage], *objects: Any, rows: int = 32, is_first: bool = False) -> list[Any]:
    """The results as the next stage gets them; refusals as texts."""
    made = PythonStage(stage, "cpu", rows, is_first=is_first)
    found = OBJECT_ROWS.decoded(made.compute(rows_of([encode(each) for each in objects])))
    made.close()
    return [f"refused: {each}" if isinstance(each, InvalidInput) else each for each in found]


def made(call: Callable[[Any, list[Any]], Any]) -> type[Stage]:
    return type("Made", (Stage,), {"__call__": call})


def test_rows_are_computed_together_and_in_their_order() -> None:
    calls: list[int] = []

    def call(_: Any, rows: list[Any]) -> list[Any]:
        calls.append(len(rows))
        return [each * 2 for each in rows]

    assert results(made(call), 1, "a", [2], rows=2) == [2, "aa", [2, 2]]
    assert calls == [2, 1]


def test_a_refused_row_does_not_disturb_the_others_and_passes_later_stages() -> None:
    def raising(_: Any, rows: list[Any]) -> list[Any]:
        if "bad" in rows:
            raise InvalidInput("bad is not allowed")
        return [each.upper() for each in rows]

    def returning(_: Any, rows: list[Any]) -> list[Any]:
        return [InvalidInput("no b") if each == "b" else each for each in rows]

    assert results(made(raising), "a", "bad", "c") == ["A", "refused: bad is not allowed", "C"]
    assert results(made(returning), "a", "b", InvalidInput("earlier")) == ["a", "refused: no b", "refused: earlier"]


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (lambda rows: rows[:1], "returned 1 results for 2 rows"),
        (lambda rows: None, "returned NoneType for 2 rows"),
        (lambda rows: "ab", "returned str for 2 rows"),
        (lambda rows: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_other_results_and_exceptions_fail_the_batch_without_a_text_for_clients(
    returned: Callable[[Any], Any], why: str
) -> None:
    with pytest.raises(StageFailedError, match=why) as raised:
        results(made(lambda _, rows: returned(rows)), 1, 2)
    assert "division" not in str(raised.value)


def test_a_tensor_of_results_has_one_for_each_row() -> None:
    found = results(made(lambda _, rows: torch.stack(rows) * 2), torch.ones(2), torch.zeros(2))
    assert [each.tolist() for each in found] == [[2, 2], [0, 0]]


def test_setup_and_example_decide_whether_a_worker_serves() -> None:
    class Broken(Stage):
        def setup(self, device: str) -> None:
            raise OSError("no file")

    class Wrong(Stage):
        def __call__(self, rows: Sequence[Any]) -> list[Any]:
            return []

        def example(self) -> list[Any]:
            return [1]

    with pytest.raises(StageFailedError, match="the stage Broken cannot be set up: OSError: no file"):
        PythonStage(Broken, "cpu", 8, is_first=True)
    with pytest.raises(StageFailedError, match="returned 0 results for 1 rows"):
        PythonStage(Wrong, "cpu", 8, is_first=True)


def test_asynchronous_stages_compute_batches_at_the_same_time() -> None:
    class Meet(Stage):
        max_concurrency: ClassVar[int] = 3

        async def __call__(self, rows: Sequence[Any]) -> Sequence[Any]:
            if not hasattr(self, "meeting"):
                self.meeting = asyncio.Barrier(3)
            await self.meeting.wait()
            return rows

    stage = PythonStage(Meet, "cpu", 8, is_first=False)
    assert stage.concurrency == 3

    async def together() -> list[Any]:
        batches = [rows_of([encode(number)]) for number in range(3)]
        async with asyncio.timeout(30):
            found = await asyncio.gather(*(asyncio.to_thread(stage.compute, each) for each in batches))
        return [OBJECT_ROWS.decoded(each)[0] for each in found]

    assert asyncio.run(together()) == [0, 1, 2]
    stage.close()


class Struct(msgspec.Struct):
    text: str


class Model(pydantic.BaseModel):
    text: str


@pytest.mark.parametrize("kind", [Struct, Model])
def test_bodies_are_objects_of_the_named_type(kind: Any) -> None:
    def call(_: Any, rows: list[Request]) -> list[Any]:
        return [each.json().text for each in rows]

    stage = type("Typed", (Stage,), {"__call__": call, "request": kind})
    good, other, broken = Request(b'{"text": "a"}'), Request(b'{"text": 5}'), Request(b"{")
    found = results(stage, good, other, broken, is_first=True)
    assert found[0] == "a"
    assert all(each.startswith("refused: the body is invalid") for each in found[1:])
    assert "text" in found[1]


def test_forms_have_files_and_fields() -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="q"\r\n\r\nwords\r\n'
        b'--b\r\nContent-Disposition: form-data; name="f"; filename="a.jpg"\r\n\r\n\xff\xd8\r\n--b--\r\n'
    )
    form = Request(body, "multipart/form-data; boundary=b").form()
    assert (form["q"].text, form["q"].filename) == ("words", None)
    assert (form["f"].data, form["f"].filename) == (b"\xff\xd8", "a.jpg")
    assert Request(b"a=1&b=2", "application/x-www-form-urlencoded").form()["b"].text == "2"
    with pytest.raises(InvalidInput, match="not a form"):
        Request(b"x", "text/plain").form()


class Masked(nn.Module):
    """Sums the ids where the mask is set, through a layer, and returns the sum and each id."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layer(self.words(ids)) * mask[..., None]
        return (self.layer(hidden) * mask[..., None]).sum((1, 2)), hidden


@pytest.fixture(scope="module")
def text_bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Masked]:
    """A bundle with 1 to 8 words."""
    torch.manual_seed(0)
    model, path = Masked().eval(), tmp_path_factory.mktemp("bundles") / "text.bundle"
    example = (torch.arange(8).view(2, 4), torch.ones(2, 4, dtype=torch.bool))
    words = Dynamic((("ids", 1), ("mask", 1)), 1, 8)
    export_model(model, example, path, ExportSettings("text", "1", ("ids", "mask"), 8, (words,), 2))
    return path, model


PIPELINE = """
    class Words(Stage):
        def __call__(self, requests):
            return [self.row(each.json()) for each in requests]

        def row(self, given):
            return given if isinstance(given, dict) else {"ids": given, "mask": [True] * len(given), "name": "kept"}

    class Numbers(Stage):
        calls = []

        def __call__(self, rows):
            self.calls.append(len(rows))
            return rows

    pipeline = [Words, Bundle(BUNDLE, stages=2PAD), Numbers]
"""


@pytest.mark.parametrize("pad", ["", ", pad={'ids': 0, 'mask': 0}"])
def test_parts_of_a_bundle_compute_rows_of_several_lengths_like_the_model(
    pad: str, text_bundle: tuple[Path, Masked], tmp_path: Path
) -> None:
    path, model = text_bundle
    text = PIPELINE.replace("BUNDLE", repr(str(path))).replace("PAD", pad)
    local = LocalPipeline(load(tmp_path, text, f"parts{len(pad)}.py"))
    rows = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 0, 1, 2], [3, 2, 1]]
    found, runs = local.run([Request(msgspec.json.encode(each)) for each in rows])
    assert [each.name for each in runs] == ["Words", "text.0", "text.1", "Numbers"]
    for ids, each in zip(rows, found, strict=True):
        with torch.inference_mode():
            total, hidden = model(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool))
        assert each["name"] == "kept"
        outputs = [each[name] for name in each if name not in ("name",)]
        torch.testing.assert_close(outputs[0], total[0])
        torch.testing.assert_close(outputs[1], hidden[0])


def test_a_row_with_one_more_dimension_has_several_samples(text_bundle: tuple[Path, Masked], tmp_path: Path) -> None:
    path, model = text_bundle
    text = PIPELINE.replace("BUNDLE", repr(str(path))).replace("PAD", "")
    local = LocalPipeline(load(tmp_path, text, "samples.py"))
    several = {"ids": [[1, 2], [3, 4], [5, 6]], "mask": [[True, True]] * 3, "boxes": [7]}
    none = {"ids": torch.empty(0, 2, dtype=torch.int64).tolist(), "mask": []}
    found, _ = local.run([Request(msgspec.json.encode(each)) for each in (several, [1, 2])])
    with torch.inference_mode():
        total, _ = model(torch.tensor(several["ids"]), torch.ones(3, 2, dtype=torch.bool))
    first = next(each for name, each in found[0].items() if name != "boxes")
    torch.testing.assert_close(first, total)
    assert found[0]["boxes"] == [7]
    with pytest.raises(ObjectError, match="'ids'"):
        local.run([Request(msgspec.json.encode(none))])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"ids": [1, 2]}, "not 'mask'"),
        ({"ids": [1, 2], "mask": [True]}, "the lengths 2 and 1"),
        ({"ids": [0.5], "mask": [True]}, "'ids' is torch.float64; expected int64"),
        ({"ids": [1] * 9, "mask": [True] * 9}, "'ids' has the shape .9."),
        ("text", "a row is str"),
    ],
)
def test_wrong_inputs_of_a_bundle_are_the_fault_of_the_stage_before_or_of_the_client(
    given: Any, why: str, text_bundle: tuple[Path, Masked], tmp_path: Path
) -> None:
    path, _ = text_bundle
    name = f"wrong{abs(hash(why)) % 10**9}"
    text = f"""
        class Give(Stage):
            def __call__(self, requests):
                return [{given!r}]
        pipeline = [Give, Bundle({str(path)!r})]
        alone = [Bundle({str(path)!r})]
    """
    loaded = load(tmp_path, text, f"{name}.py")
    with pytest.raises(ObjectError, match=why):
        LocalPipeline(loaded).run([Request()])
    alone = loaded.source._replace(attribute="alone").load()
    with pytest.raises(InvalidInput, match=why):
        LocalPipeline(alone).result(Request(msgspec.json.encode(given)))
