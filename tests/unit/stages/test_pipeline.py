"""Tests the description of a pipeline, and the error messages for invalid pipelines."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from multiworld_serving.common.service.model_files import with_description
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.models.errors import StageSpecError
from multiworld_serving.models.stages.pipeline import PipelineSource, describe, expanded
from tests.unit.stages.pipelines import write

TWO = """
    import msgspec

    class Search(msgspec.Struct):
        text: str

    class First(Stage):
        request = Search
        replicas = 3
        device = "cpu"

    class Second(Stage):
        max_batch_size = 4
        max_wait_ms = 5
        max_concurrency = 16

        async def __call__(self, rows):
            return rows

    path = "/v1/search"
    pipeline = [First, Bundle("text.bundle", stages=2, pad={"ids": 0}), Second]
"""


@pytest.mark.parametrize(
    ("text", "name", "stem"),
    [
        ("a/search.py:pipeline", "search.py:pipeline", "search"),
        ("search.py:other", "search.py:other", "search"),
        ("package.module:pipeline", "package.module:pipeline", "module"),
    ],
)
def test_sources_are_known_by_their_names_without_folders(text: str, name: str, stem: str) -> None:
    source = PipelineSource.parse(text)
    assert source is not None
    assert (source.name, source.stem) == (name, stem)


@pytest.mark.parametrize(
    "text", ["resnet50", "clocks.bundle", "search.py", "a/b:c", "search.py:", ":pipeline", "x y:z"]
)
def test_other_texts_are_not_pipelines(text: str) -> None:
    assert PipelineSource.parse(text) is None


def test_a_pipeline_is_described_without_importing_it_here(tmp_path: Path) -> None:
    found = describe(write(tmp_path, TWO, "described.py"))
    first, bundle, second = found.stages
    assert (first.name, first.replicas, first.device) == ("First", 3, "cpu")
    assert (bundle.name, bundle.bundle, bundle.stages) == ("text", str(tmp_path / "text.bundle"), 2)
    assert (second.max_batch_size, second.max_wait_ms, second.concurrency) == (4, 5, 16)
    assert found.path == "/v1/search"
    assert found.request_schema is not None
    assert "text" in str(found.request_schema)
    settings = with_description(LeaderSettings(token=SecretStr("t"), model=f"{tmp_path}/described.py:pipeline"), found)
    assert (settings.stages, settings.replicas_by_stage) == (4, (3, 2, 2, 2))


def test_settings_of_single_stages_replace_those_of_the_classes(tmp_path: Path) -> None:
    found = describe(write(tmp_path, TWO, "replaced.py"))
    changed = expanded(found, {"First": {"replicas": 1}, "Second": {"max_batch_size": 2}})
    assert [each.replicas for each in changed.stages] == [1, None, None]
    assert changed.stages[2].max_batch_size == 2
    with pytest.raises(StageSpecError, match=r"'Third'.* has the stages First, text, Second"):
        expanded(found, {"Third": {}})
    with pytest.raises(StageSpecError, match="no setting nice"):
        expanded(found, {"First": {"nice": 1}})
    with pytest.raises(StageSpecError, match="replicas"):
        expanded(found, {"First": {"replicas": "many"}})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import missing_module\npipeline = []", r"No module named 'missing_module' at line 2 of .*broken\d+.py"),
        ("pipeline = [", r"SyntaxError"),
        ("1 / 0", r"ZeroDivisionError: division by zero at line 2 of"),
        ("raise SystemExit(3)", "SystemExit"),
        ("import os; os._exit(7)", "ended with status 7"),
        ("import ctypes; ctypes.string_at(0)", "ended with status -11"),
        ("pipeline = []", "expected a list of 1 to 64"),
        ("pipeline = 5", "is int; expected a list"),
        ("pipeline = [5]", "expected a list of 1 to 64 subclasses of Stage"),
        ("class A(Stage): pass\npipeline = [A, A]", "equal names: A, A"),
        ("class A(Stage): replicas = 'x'\npipeline = [A]", "the stage A of .*replicas"),
        ("class A(Stage): request = 5\npipeline = [A]", "expected a msgspec Struct or a pydantic model"),
        ("class A(Stage): pass\npipeline = [A]\npath = 'x'", "expected a path such as"),
        ("print('noise'); other = 1", "is NoneType; expected a list"),
    ],
)
def test_a_pipeline_that_cannot_be_served_is_refused_with_the_reason(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(StageSpecError, match=why):
        describe(write(tmp_path, text, f"broken{abs(hash(text)) % 10**9}.py"))


def test_a_missing_file_is_named() -> None:
    source = PipelineSource.parse("nowhere.py:pipeline")
    assert source is not None
    with pytest.raises(StageSpecError, match=r"nowhere\.py"):
        describe(source)


def test_the_digest_of_a_package_is_that_of_all_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_pipelines"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("A = 1")
    write(package, "class A(Stage): pass\npipeline = [A]", "search.py")
    monkeypatch.syspath_prepend(tmp_path)
    source = PipelineSource.parse("some_pipelines.search:pipeline")
    assert source is not None
    before = source.digest()
    (package / "helper.py").write_text("A = 2")
    assert source.digest() != before


def test_a_process_does_not_run_code_that_has_changed_since_it_was_imported(tmp_path: Path) -> None:
    source = write(tmp_path, "class A(Stage): pass\npipeline = [A]", "changing.py")
    source.load()
    write(tmp_path, "class B(Stage): pass\npipeline = [B]", "changing.py")
    with pytest.raises(StageSpecError, match="have changed since"):
        source.load()
