"""A pipeline of stages in Python: the file that defines it, its description, and its stages in a worker.

Leaders, frontends and the supervisor know the description only: `describe` reads it in a process of its own. Workers import the file, if
their operator has allowed it.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

import msgspec
from msgspec import Struct

from multiworld_serving.models.errors import StageSpecError
from multiworld_serving.models.generate.folder import digest_of
from multiworld_serving.models.stages.api import Bundle, Stage

_DESCRIBE_S = 300.0
"""Longest time for importing a pipeline."""
_POLL_S = 0.02
_DECODER = "generate"
_MAX_STAGES = 64


class PipelineStage(Struct, frozen=True):
    """An element of a pipeline.

    Attributes:
        name: of the class or of the bundle's file.
        bundle: the path of a bundle; empty for a class.
        stages: into how many stages the bundle is cut.
        pad: see `Bundle`.
        device, replicas, max_batch_size, max_wait_ms: see `Stage`.
        concurrency: batches that a worker computes at the same time.
        streams, resumes: whether it yields chunks, and has `resume`; see `Stage.stream`.
    """

    name: str
    bundle: str = ""
    stages: int = 1
    pad: dict[str, float] = {}
    device: str | None = None
    replicas: int | None = None
    max_batch_size: int | None = None
    max_wait_ms: float | None = None
    concurrency: int = 1
    streams: bool = False
    resumes: bool = False


class PipelineDescription(Struct, frozen=True):
    """What a service knows of a pipeline.

    Attributes:
        name: FILE.py:LIST without folders, or MODULE:LIST.
        digest: of the file, or of all files of the package, SHA-256.
        path: of its own route; empty if it has none.
        request_schema: the JSON Schema of bodies; None: any body.
        decoder: the folder of a decoder, which generates text; empty for others. Its only element has as many stages as the service says.
    """

    name: str
    digest: str
    stages: tuple[PipelineStage, ...]
    path: str = ""
    request_schema: dict[str, Any] | None = None
    decoder: str = ""


class PipelineSource(NamedTuple):
    """The place of a pipeline: FILE.py:LIST or MODULE:LIST; or of a decoder: generate:FOLDER.

    Attributes:
        where: the path of the file, or the name of the module.
        attribute: the name of the list.
    """

    where: str
    attribute: str

    @classmethod
    def parse(cls, text: str) -> PipelineSource | None:
        """The source that a text names; None if it names none."""
        if text.startswith(f"{_DECODER}:"):
            return cls(_DECODER, text.removeprefix(f"{_DECODER}:"))
        where, colon, attribute = text.rpartition(":")
        is_place = where.endswith(".py") or (os.sep not in where and all(map(str.isidentifier, where.split("."))))
        return cls(where, attribute) if colon and is_place and attribute.isidentifier() else None

    @property
    def is_file(self) -> bool:
        """Whether it is a file and not an importable module."""
        return self.where.endswith(".py")

    @property
    def is_decoder(self) -> bool:
        """Whether it is a folder with a decoder."""
        return self.where == _DECODER

    @property
    def name(self) -> str:
        """By which workers know it: without folders."""
        if self.is_decoder:
            return f"{_DECODER}:{Path(self.attribute).absolute().name}"
        return f"{Path(self.where).name if self.is_file else self.where}:{self.attribute}"

    @property
    def stem(self) -> str:
        """The name of a model that has no other one."""
        if self.is_decoder:
            return Path(self.attribute).absolute().name
        return Path(self.where).stem if self.is_file else self.where.rpartition(".")[2]

    @property
    def absolute(self) -> str:
        """The source for a process with another working directory."""
        if self.is_decoder:
            return f"{_DECODER}:{Path(self.attribute).absolute()}"
        return f"{Path(self.where).absolute() if self.is_file else self.where}:{self.attribute}"

    def digest(self) -> str:
        """The SHA-256 hash of the file, or of all Python files of the package. Raises StageSpecError if there is none."""
        if self.is_decoder:
            return digest_of(Path(self.attribute))
        files = [Path(self.where)] if self.is_file else self._files()
        found = hashlib.sha256()
        try:
            for path in files:
                content = path.read_bytes()
                found.update(f"{path.name} {len(content)}\n".encode() + content)
        except OSError as error:
            raise StageSpecError(f"the pipeline {self.name} cannot be read: {error}") from error
        return found.hexdigest()

    def _files(self) -> list[Path]:
        try:
            spec = importlib.util.find_spec(self.where.partition(".")[0])
        except (ImportError, ValueError):
            spec = None
        if spec is None or spec.origin is None:
            raise StageSpecError(
                f"the pipeline {self.name}: there is no module {self.where}; give FILE.py:LIST, or install it"
            )
        if spec.submodule_search_locations is None:
            return [Path(spec.origin)]
        return sorted(path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*.py"))

    def described_decoder(self) -> PipelineDescription:
        """The description of a decoder. Raises StageSpecError."""
        stages = (PipelineStage("Decoder", stages=0),)
        return PipelineDescription(self.name, self.digest(), stages, decoder=str(Path(self.attribute).absolute()))

    def load(self) -> Pipeline:
        """Import it. Raises StageSpecError that says which line failed, what is missing, or that the imported code is another one."""
        try:
            digest, module = self.digest(), self._module()
            if (imported := module.__dict__.setdefault("_multiworld_digest", digest)) != digest:
                raise ImportError(
                    f"its files have changed since this process imported them: {imported} became {digest}"
                )
        except BaseException as error:
            raise StageSpecError(f"the pipeline {self.name} cannot be imported: {located(error)}") from error
        given = getattr(module, self.attribute, None)
        if callable(given):
            raise StageSpecError(
                f"{self.name} is a function or a class; expected a list of stages. An nn.Module that it returns is exported first: "
                f"multiworld export {self.where}:{self.attribute} -o {self.stem}.bundle"
            )
        stages = given if isinstance(given, list | tuple) else ()
        if not 0 < len(stages) <= _MAX_STAGES or not all(map(_is_element, stages)):
            found = f"a list of {len(stages)}: {given!r:.100}" if stages is given else type(given).__name__
            raise StageSpecError(
                f"{self.name} is {found}; expected a list of 1 to {_MAX_STAGES} subclasses of Stage, and Bundles"
            )
        return Pipeline(self, module, tuple(stages))

    def _module(self) -> ModuleType:
        if not self.is_file:
            return importlib.import_module(self.where)
        path = Path(self.where).absolute()
        name = path.stem
        if (known := sys.modules.get(name)) is not None and getattr(known, "__file__", None) == str(path):
            return known
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {self.where}")
        if (folder := str(path.parent)) not in sys.path:
            sys.path.insert(0, folder)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None, "it ends in .py"
        assert spec.loader is not None, "it ends in .py"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


class Pipeline(NamedTuple):
    """An imported pipeline."""

    source: PipelineSource
    module: ModuleType
    elements: tuple[type[Stage] | Bundle, ...]

    def describe(self) -> PipelineDescription:
        """Its description. Raises StageSpecError for an invalid attribute."""
        folder = Path(self.module.__file__ or "").absolute().parent
        stages = [self._stage(each, folder) for each in self.elements]
        names = [each.name for each in stages]
        if len(set(names)) < len(names):
            raise StageSpecError(f"{self.source.name} has stages with equal names: {', '.join(names)}; rename a class")
        path = getattr(self.module, "path", "")
        path = path.get(self.source.attribute, "") if isinstance(path, Mapping) else path
        if not isinstance(path, str) or (path and not path.startswith("/")):
            raise StageSpecError(f"path = {path!r} of {self.source.name}: expected a path such as '/v1/embeddings'")
        first = self.elements[0]
        schema = (
            None if isinstance(first, Bundle) or first.request is None else _schema(first.request, self.source.name)
        )
        return PipelineDescription(self.source.name, self.source.digest(), tuple(stages), path, schema)

    def _stage(self, element: type[Stage] | Bundle, folder: Path) -> PipelineStage:
        if isinstance(element, Bundle):
            path = str(folder / element.path)
            given: dict[str, Any] = {"bundle": path, "stages": element.stages, "pad": dict(element.pad)}
            name, replicas = Path(element.path).stem, element.replicas
        else:
            settings = ("device", "max_batch_size", "max_wait_ms")
            given = {name: getattr(element, name) for name in settings}
            if inspect.iscoroutinefunction(element.__call__):
                given["concurrency"] = element.max_concurrency
            if is_streaming(element):
                has_other = element.__call__ is not Stage.__call__ or inspect.isasyncgenfunction(element.stream)
                if has_other or element is not self.elements[-1]:
                    raise StageSpecError(
                        f"the stage {element.__name__} of {self.source.name} has the method stream; expected it in the last stage only, "
                        "without async and without __call__"
                    )
                given |= {"streams": True, "resumes": hasattr(element, "resume")}
            name, replicas = element.__name__, element.replicas
        try:
            return msgspec.convert({"name": name, "replicas": replicas} | given, PipelineStage)
        except msgspec.ValidationError as error:
            raise StageSpecError(f"the stage {name} of {self.source.name}: {error}") from error


def _is_element(given: object) -> bool:
    return isinstance(given, Bundle) or (isinstance(given, type) and issubclass(given, Stage))


def is_streaming(kind: type[Stage]) -> bool:
    """Whether the stage yields chunks."""
    return kind.stream is not Stage.stream


def _schema(kind: Any, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = (
            kind.model_json_schema() if hasattr(kind, "model_json_schema") else msgspec.json.schema(kind)
        )
    except (TypeError, ValueError) as error:
        raise StageSpecError(
            f"request = {kind!r:.60} of {name}: expected a msgspec Struct or a pydantic model ({error})"
        ) from error
    return found


def located(error: BaseException) -> str:
    """An error of the user's code in one line, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}{where}"


def describe(source: PipelineSource) -> PipelineDescription:
    """The description of a pipeline, which another process imports: code of users never runs in this one. Blocks.

    Raises:
        StageSpecError: it cannot be imported, or is not a pipeline.
    """
    return asyncio.run(describe_meanwhile(source))


async def describe_meanwhile(source: PipelineSource) -> PipelineDescription:
    """As `describe`, without blocking the event loop, and without a thread: a supervisor with threads cannot fork."""
    if source.is_decoder:
        return source.described_decoder()
    command = [sys.executable, "-P", "-m", __name__, source.absolute]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, stdout=out, stderr=errors) as process:  # noqa: S603, ASYNC220 - this module
            try:
                async with asyncio.timeout(_DESCRIBE_S):
                    while process.poll() is None:  # noqa: ASYNC110
                        await asyncio.sleep(_POLL_S)
            except TimeoutError as error:
                raise StageSpecError(f"importing {source.name} takes more than {_DESCRIBE_S:g} s") from error
            finally:
                process.kill()
        text, log = (_last_line(file) for file in (out, errors))
    try:
        given = msgspec.json.decode(text, type=PipelineDescription | str)
    except msgspec.MsgspecError:
        given = f"the process that imports {source.name} ended with status {process.returncode}: {log.decode('utf-8', 'replace')}"
    if isinstance(given, str):
        raise StageSpecError(given)
    return given


def _last_line(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read().strip().rpartition(b"\n")[2]


def expanded(description: PipelineDescription, settings: Mapping[str, Mapping[str, Any]]) -> PipelineDescription:
    """The description with the settings of single stages, by their names. Raises StageSpecError for an unknown stage or setting."""
    names = [each.name for each in description.stages]
    for name in settings:
        if name not in names:
            raise StageSpecError(f"stage_settings of {name!r}: {description.name} has the stages {', '.join(names)}")
    changed = []
    for each in description.stages:
        own = dict(settings.get(each.name, {}))
        unknown = own.keys() - {"device", "replicas", "max_batch_size", "max_wait_ms"}
        try:
            if unknown:
                raise msgspec.ValidationError(f"there is no setting {min(unknown)}")
            changed.append(msgspec.convert(msgspec.to_builtins(each) | own, PipelineStage))
        except msgspec.ValidationError as error:
            raise StageSpecError(f"stage_settings of {each.name}: {error}") from error
    return msgspec.structs.replace(description, stages=tuple(changed))


def _main(arguments: Sequence[str]) -> None:
    """Print the description of a pipeline as JSON, or as a text why there is none. What its code prints goes to standard error."""
    out = os.dup(1)
    os.dup2(2, 1)
    source = PipelineSource.parse(arguments[0])
    assert source is not None, "`describe` gives one"
    answer: object
    try:
        answer = source.load().describe()
    except StageSpecError as error:
        answer = str(error)
    os.write(out, b"\n" + msgspec.json.encode(answer))
    os._exit(0)  # threads of imported modules may not end


if __name__ == "__main__":
    _main(sys.argv[1:])
