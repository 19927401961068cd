"""What a pipeline is written with: `Stage`, `Bundle`, `Request`, `Response` and `InvalidInput`, which `multiworld_serving` exports.

The division of a program into set-up, decoding, prediction and encoding is that of LitServe's `LitAPI` and of mosec's `Worker`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import msgspec
from python_multipart import parse_form
from python_multipart.exceptions import FormParserError

_MAX_ERROR_CHARS = 1000


class InvalidInput(Exception):  # noqa: N818 - users read it as an outcome of a row
    """A request that the pipeline does not accept: its client gets 400 with this text. Raise it, or return it in place of a result."""


class FormField(NamedTuple):
    """A field of a form. `filename` is None unless the field is a file."""

    data: bytes
    filename: str | None = None

    @property
    def text(self) -> str:
        """The data as text."""
        return self.data.decode("utf-8", "replace")


class Request:
    """What the first stage gets for each row.

    Attributes:
        body: as the client sent it.
        content_type: of the body; "" if the client named none.
        query: the parameters of the URL.
        headers: by lower-case name. Credentials, cookies and connection headers are removed.
        inputs: the tensors and texts of a request of the Open Inference Protocol for this row, by name, without the batch dimension: numpy
            arrays, bytes, or numbers; empty for other requests.
    """

    type: Any = None
    """The type of its JSON: `Stage.request` of the first stage."""

    def __init__(
        self,
        body: bytes = b"",
        content_type: str = "",
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> None:
        self.body = body
        self.content_type = content_type
        self.query = query or {}
        self.headers = headers or {}
        self.inputs = inputs or {}

    @property
    def text(self) -> str:
        """The body as text. Raises InvalidInput if it is not UTF-8."""
        try:
            return str(self.body, "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidInput(f"the body is not UTF-8: {error}") from error

    def json(self) -> Any:
        """The body as JSON, as an object of `Stage.request` if the first stage names a type.

        Raises:
            InvalidInput: it is not JSON, or not of this type.
        """
        kind = self.type
        try:
            if kind is not None and hasattr(kind, "model_validate_json"):
                return kind.model_validate_json(self.body)
            return msgspec.json.decode(self.body, type=Any if kind is None else kind)
        except (ValueError, RecursionError) as error:  # of msgspec and of pydantic
            raise InvalidInput(f"the body is invalid: {str(error)[:_MAX_ERROR_CHARS]}") from error

    def form(self) -> dict[str, FormField]:
        """The fields of a body of the type multipart/form-data or application/x-www-form-urlencoded. Raises InvalidInput."""
        found: dict[str, FormField] = {}

        def on_field(part: Any) -> None:
            found[_text(part.field_name)] = FormField(part.value or b"")

        def on_file(part: Any) -> None:
            part.file_object.seek(0)
            found[_text(part.field_name)] = FormField(part.file_object.read(), _text(part.file_name))

        headers = {"Content-Type": self.content_type.encode(), "Content-Length": str(len(self.body)).encode()}
        try:
            parse_form(headers, io.BytesIO(self.body), on_field, on_file)
        except (FormParserError, ValueError) as error:
            raise InvalidInput(f"the body is not a form: {error}") from error
        return found


def _text(name: bytes | None) -> str:
    return "" if name is None else name.decode("utf-8", "replace")


class Response:
    """What the last stage may return to choose more than the body."""

    def __init__(
        self,
        body: bytes | str = b"",
        content_type: str = "application/octet-stream",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.body = body.encode() if isinstance(body, str) else bytes(body)
        self.content_type = content_type
        self.status = status
        self.headers = headers or {}


class Stage:
    """A stage of a pipeline. Each worker of the stage makes one object and calls `setup` once.

    The attributes are settings of the stage; the table `stage_settings` of a settings file may replace them.
    """

    device: ClassVar[str | None] = None
    """What `setup` gets: "cpu", "cuda" or "cuda:N"; None: the device of the worker."""
    replicas: ClassVar[int | None] = None
    """Number of workers; None: that of the service."""
    max_batch_size: ClassVar[int | None] = None
    """Most rows of one call; None: those of a batch of the service."""
    max_wait_ms: ClassVar[float | None] = None
    """How long a batch may wait for more rows before the first stage; None: as the service. The largest value of all stages counts."""
    max_concurrency: ClassVar[int] = 8
    """Calls of an `async def __call__` at the same time in one worker."""
    request: ClassVar[Any] = None
    """Of the first stage: the type of `Request.json()`, a msgspec Struct or a pydantic model. Frontends refuse other bodies."""

    def setup(self, device: str) -> None:
        """Load what calls need. A worker serves when it has returned, and `example` has been computed."""

    def __call__(self, rows: Sequence[Any], /) -> Any:
        """Compute a batch: one result for each row, in their order. It may be `async def`.

        The rows are requests in the first stage, and otherwise results of the stage before. Results are None, bool, int, float, str,
        bytes, list, dict, numpy arrays and torch tensors, or InvalidInput for a row that has none. The last stage returns the response:
        bytes, str, a `Response`, or what JSON can express.
        """
        raise NotImplementedError

    def stream(self, row: Any, /) -> Any:
        """Of the last stage, in place of `__call__`: yield the response to one row in chunks, each as a response of `__call__`, of at most
        1 MiB. It is a generator, not `async`. The first chunk may be a `Response`, which chooses status and headers.

        If the client disconnects, the generator is closed. If the worker is lost before the first chunk was sent, another one calls
        `stream`. A loss after that ends the response with an error, unless the class has the method `resume(row, sent)`. Another
        worker calls it with the chunks that the client has received. It yields the remaining chunks.
        """
        raise NotImplementedError

    def example(self) -> Sequence[Any]:
        """Rows for the self-test: `__call__` must return one result for each before the worker serves. None: there is no self-test."""
        return ()


@dataclass(frozen=True, eq=False)
class Bundle:
    """A bundle of `multiworld export` as a part of a pipeline. Its rows are dicts with its inputs by name, without the batch dimension.

    It returns its outputs by name, and all other keys unchanged. If the inputs have one more dimension, the row has several samples, and so
    have the outputs.

    Args:
        path: of the bundle; a relative one is seen from the file with the pipeline.
        stages: into how many stages it is cut.
        pad: the values with which inputs of different lengths are padded to the longest one of a batch, by name. Outputs get the length
            of their row. Without it, only rows of equal lengths are computed together.
        replicas: as `Stage.replicas`.
    """

    path: str
    stages: int = 1
    pad: Mapping[str, float] = field(default_factory=dict)
    replicas: int | None = None
