"""`multiworld check`: run a pipeline in Python in one process, without a service."""

import sys
import traceback
from pathlib import Path

from multiworld_serving.cli.console import table
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.settings import DEVICE_PATTERN, Options, setting


class CheckOptions(Options):
    """Options of `check`."""

    source: str = setting(positional=True, metavar="FILE.py:LIST")
    """The pipeline: FILE.py:LIST or MODULE:LIST."""
    input: Path = setting(metavar="BODY")
    """File with the body of a request."""
    content_type: str | None = setting(None, metavar="TYPE")
    """Content type of the request; by default that of the name of the file."""
    device: str = setting("cpu", pattern=DEVICE_PATTERN, allowed="cpu, cuda or cuda:N")
    """Device to compute on."""
    output: Path | None = setting(None, names=("--output", "-o"), metavar="FILE")
    """File for the response; by default it is printed."""


def check(options: CheckOptions) -> int:
    """Run a pipeline of stages in Python in this process with one request, and show its response, and time and size for each stage.

    The request is computed twice: the times are those of the second run. If a stage raises, shows the traceback.

    Examples:
        multiworld check search.py:pipeline --input query.json

    Exit status: 0 there is a response, 1 a stage has refused the request or raised, 2 the pipeline is invalid.
    """
    from multiworld_serving.models.stages.api import InvalidInput, Request
    from multiworld_serving.models.stages.local import LocalPipeline
    from multiworld_serving.models.stages.pipeline import PipelineSource
    from multiworld_serving.models.stages.stage import StageFailedError
    from multiworld_serving.testing.load.requests import body_file

    source = PipelineSource.parse(options.source)
    if source is None:
        raise UserError(f"{options.source!r} is not a pipeline; expected FILE.py:LIST or MODULE:LIST")
    body, content_type = body_file(options.input)
    request = Request(body, options.content_type or content_type)
    try:
        pipeline = LocalPipeline(source.load(), options.device)
        pipeline.run([request])
        (result,), runs = pipeline.run([request])
    except StageFailedError as error:
        traceback.print_exception(error.__cause__ or error)
        print(f"multiworld: error: {error}", file=sys.stderr)
        return 1
    rows = [(each.name, f"{each.seconds * 1e3:.2f} ms", f"{each.row_bytes:,} bytes") for each in runs]
    print(table(("stage", "time", "output"), rows), file=sys.stderr)
    if isinstance(result, InvalidInput):
        print(f"multiworld: error: 400: {result}", file=sys.stderr)
        return 1
    from multiworld_serving.models.stages.responses import response_of

    response = response_of(result)
    if options.output is not None:
        options.output.write_bytes(response.body)
    else:
        sys.stdout.buffer.write(response.body + b"\n")
    return 0
