"""Settings, environment variables, options, metrics, identifiers and files that the documentation names exist."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from multiworld_serving.cli.main import VERBS
from multiworld_serving.cli.options import PROGRAMS, parser_of
from multiworld_serving.common.config.sources import OTHER_VARIABLES, variable
from multiworld_serving.common.settings.serve import ServeSettings
from tests.dashboard_queries import recorded_names
from tests.documents import ROOT, documents
from tests.unit.documents.test_docs_links import FENCED
from tests.unit.programs.test_dashboards import told

SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
VARIABLE = re.compile(r"\bMULTIWORLD_[A-Z][A-Z_]*[A-Z]\b")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
IDENTIFIER = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+")
METRIC = re.compile(r"(?P<name>[a-z_]+)(?:\{(?P<labels>[a-z_,]+)\})?")
FILE = re.compile(r"[\w.-]+(?:/[\w.*-]+)+")
ADDED_LABELS = {"namespace", "instance", "job", "le", "model", "process"}
"""Prometheus and the scrape of a service add them to many metrics, and `le` is part of each histogram."""
PARTS_OF_FAMILIES = re.compile(r"_(?:bucket|sum|count|created)$")
SOURCES = ("py", "yml", "yaml", "json", "toml", "html", "js", "css", "sh", "sbatch", "service")

FOREIGN_OPTIONS = {
    "--gpus-per-task",
    "--model-control-mode",  # Triton
    *("--no-kill", "--nodes", "--requeue"),  # Slurm
    "--port",  # torchrun
}
FOREIGN_IDENTIFIERS = {
    *(
        "api_auth",
        "api_path",
        "request_timeout_s",
        "batch_timeout",
        "decode_request",
        "encode_response",
        "max_payload_size",
    ),  # LitServe
    *("job_queue_size", "max_batch_delay", "min_worker"),  # TorchServe
    *("perf_analyzer", "version_policy"),  # Triton
}
NOT_EXPORTED = {
    *("multiworld_client", "multiworld_serving"),
    "multiworld_workers_wanted",
    "multiworld_frontend_requests",  # of the Prometheus adapter for Kubernetes
}
"""Names that begin like those of metrics."""
PAGES = {str(page.relative_to(ROOT)): page for page in documents()}


@pytest.fixture(params=list(PAGES.values()), ids=list(PAGES))
def page(request: pytest.FixtureRequest) -> str:
    """The text of a page."""
    text: str = request.param.read_text(encoding="utf-8")
    return text


def spans(text: str) -> set[str]:
    """The inline code of a page."""
    return set(SPAN.findall(FENCED.sub("", text)))


@cache
def sources() -> str:
    """All program text of the repository."""
    files = [path for suffix in SOURCES for path in ROOT.glob(f"[a-z]*/**/*.{suffix}")]
    files += [*ROOT.glob("*.yml"), ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / "Dockerfile"]
    here = Path(__file__).parent
    return "\n".join(path.read_text(encoding="utf-8") for path in files if path.is_file() and here not in path.parents)


@cache
def words() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", sources()))


@cache
def metrics() -> dict[str, set[str]]:
    """Label names of each metric, by its name as in the documentation."""
    found: dict[str, set[str]] = {}
    for name, labels in told().items():
        found.setdefault(PARTS_OF_FAMILIES.sub("", name), set()).update(labels)
    return found


@cache
def options() -> frozenset[str]:
    """Options of all verbs, and those that benchmarks, examples and the simulation declare."""
    named = {name for verb in VERBS.items() for name in parser_of(*verb)._option_string_actions}
    declared = re.findall(r"add_argument\(\s*\"(--[a-z0-9-]+)\"", sources())
    return frozenset({*named, *declared})


def test_environment_variables_are_settings_or_read_by_a_program(page: str) -> None:
    known = {variable(name) for cls in PROGRAMS for name in cls.model_fields} | {
        f"MULTIWORLD_{name}" for name in OTHER_VARIABLES
    }
    assert set(VARIABLE.findall(page)) <= known | words()


def test_options_are_declared(page: str) -> None:
    named = {
        option for span in spans(page) if span.startswith(("--", "multiworld ")) for option in OPTION.findall(span)
    }
    assert named <= options() | FOREIGN_OPTIONS


def test_identifiers_occur_in_the_source(page: str) -> None:
    named = {span for span in spans(page) if IDENTIFIER.fullmatch(span)}
    unprefixed = {name.removeprefix("multiworld_") for name in metrics()}
    assert named <= words() | metrics().keys() | unprefixed | FOREIGN_IDENTIFIERS | NOT_EXPORTED


def test_metrics_with_prefix_are_exported_with_these_labels(page: str) -> None:
    known = metrics() | {name: set() for name in recorded_names()}
    for name, labels in re.findall(r"\b(multiworld_[a-z_]+)(?:\{([a-z_,]+)\})?", page):
        if PARTS_OF_FAMILIES.sub("", name) in known:
            assert set(filter(None, labels.split(","))) <= known[PARTS_OF_FAMILIES.sub("", name)], name
        else:
            assert name in NOT_EXPORTED, name


def test_files_exist(page: str) -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    named = {span for span in spans(page) if FILE.fullmatch(span) and span.split("/")[0] in folders - {"build"}}
    assert not [span for span in named if not any(ROOT.glob(span.rstrip("/")))]


def documented_metrics() -> Iterator[tuple[str, set[str]]]:
    """Names and labels in the first column of the tables of metrics."""
    text = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8").partition("## The metrics")[2]
    for row in text.splitlines():
        first_cell = row.split(" | ")[0]
        for span in SPAN.findall(first_cell) if row.startswith("| `") else ():
            if found := METRIC.fullmatch(span):
                yield f"multiworld_{found['name']}", set(filter(None, (found["labels"] or "").split(",")))


def test_tables_of_metrics_are_complete_and_right() -> None:
    documented = {name for name, _ in documented_metrics()}
    exported = {name for name in metrics() if name.startswith("multiworld_")}
    assert documented == exported
    for name, labels in documented_metrics():
        assert labels <= metrics()[name], name
        assert metrics()[name] - ADDED_LABELS <= labels, name


def test_response_headers_of_the_openapi_document_are_described() -> None:
    document = json.loads((ROOT / "server/frontend/api/openapi.json").read_text())
    described = spans(PAGES["docs/http.md"].read_text())
    assert set(document["components"]["headers"]) - {"WWW-Authenticate"} <= described


def test_ports_in_the_picture_are_the_defaults() -> None:
    picture = (ROOT / "docs" / "img" / "ports.svg").read_text(encoding="utf-8")
    defaults = [ServeSettings.model_fields[name].default for name in ("http_port", "admin_port", "join_port")]
    assert set(re.findall(r">(\d+)<", picture)) == set(map(str, defaults))
    assert set(OPTION.findall(picture)) <= options()
