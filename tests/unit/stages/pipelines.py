"""Writes files with pipelines."""

import textwrap
from pathlib import Path

from multiworld_serving.models.stages.pipeline import Pipeline, PipelineSource

HEAD = "from multiworld_serving import Bundle, InvalidInput, Request, Response, Stage\n"


def write(folder: Path, text: str, name: str = "made.py") -> PipelineSource:
    """The source of the list `pipeline` in a new file."""
    path = folder / name
    path.write_text(HEAD + textwrap.dedent(text))
    source = PipelineSource.parse(f"{path}:pipeline")
    assert source is not None
    return source


def load(folder: Path, text: str, name: str) -> Pipeline:
    """The imported pipeline. Files need different names: a process imports each name once."""
    return write(folder, text, name).load()
