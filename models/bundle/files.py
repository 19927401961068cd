"""Reads and writes bundles: a folder or a .zip file with `manifest.json`, `graph.json`, `weights.safetensors` and `self_test.safetensors`.

Reading evaluates nothing, bounds everything, and checks every digest before a tensor is used. The weights stay in their file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, fx

from multiworld_serving.models.bundle.checking import check_graph, check_in_child
from multiworld_serving.models.bundle.graph import MAX_GRAPH_BYTES, Graph
from multiworld_serving.models.bundle.manifest import MAX_MANIFEST_BYTES, Manifest, spec_of
from multiworld_serving.models.bundle.nodes import BATCH
from multiworld_serving.models.bundle.rows import RowFormat
from multiworld_serving.models.errors import BundleError

MANIFEST, GRAPH, WEIGHTS, SELF_TEST = "manifest.json", "graph.json", "weights.safetensors", "self_test.safetensors"
_MAX_SELF_TEST_BYTES = 1 << 30
_MAX_HEADER_BYTES = 100 << 20
_CHUNK = 2 << 20
"""Elements that are handled at a time."""
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"


class TensorEntry(NamedTuple):
    """Where a tensor is in a file.

    Attributes:
        offset, size: in bytes.
    """

    offset: int
    size: int


class TensorFile:
    """Owns a descriptor, which is closed with the last reference to this object.

    `entries` and `tensors` raise SafetensorError for a file of another format, and OSError.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def fileno(self) -> int:
        """The descriptor, open as long as this object exists."""
        return self._descriptor

    def tensors(self) -> Any:
        """A context manager. Its `get_tensor` maps a tensor by key."""
        return safe_open(f"/proc/self/fd/{self._descriptor}", framework="pt")

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """Where each tensor is, by key."""
        with self.tensors():
            pass  # checks the header
        (length,) = _LENGTH.unpack(os.pread(self._descriptor, _LENGTH.size, 0))
        header = json.loads(os.pread(self._descriptor, length, _LENGTH.size))
        start = _LENGTH.size + length
        return {
            key: TensorEntry(start + begin, end - begin)
            for key, entry in header.items()
            if key != _METADATA
            for begin, end in (entry["data_offsets"],)
        }


@dataclass(frozen=True)
class Bundle:
    """A model that was read and checked.

    Attributes:
        self_test: tensors of one row: "input.NAME" of every input, and "boundary.K.INDEX" for output INDEX of stage K, as
            computed in float32 when the bundle was made. The last stage's are the outputs of the model.
    """

    manifest: Manifest
    graph: Graph
    self_test: Mapping[str, Tensor]
    weights_file: TensorFile

    def weights(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Weights by key. They share memory with the file, which is mapped while they exist: do not modify them."""
        with self.weights_file.tensors() as file:
            return {key: file.get_tensor(key) for key in dict.fromkeys(keys)}

    @property
    def digest(self) -> str:
        """Hash of the graph and the weights."""
        files = self.manifest.sha256
        return hashlib.sha256(f"{files.get(GRAPH)} {files.get(WEIGHTS)}".encode()).hexdigest()[:16]

    def build(self, stage: Graph, device: torch.device | str = "cpu") -> fx.GraphModule:
        """A module that computes a stage of `graph`, or all of it, on this device."""
        wanted = torch.device(device)
        tensors = self.weights(node.key for node in stage.weights)
        return stage.build({key: tensor.to(wanted) for key, tensor in tensors.items()}, wanted)

    @property
    def stages(self) -> tuple[Graph, ...]:
        """The stages of the bundle's own cuts."""
        return self.graph.cut(self.manifest.cuts)


def read_bundle(path: Path) -> Bundle:
    """Read a bundle from a folder or a .zip file. Blocks: reads and hashes the weights.

    Raises:
        BundleError: it is not a bundle, damaged, or not allowed. Nothing is left behind.
    """
    with ExitStack() as stack:
        try:
            if path.is_dir():
                return _read_folder(path)
            if path.suffix.lower() == ".zip" and path.is_file():
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="multiworld-bundle-")))
                _unpack(path, folder)
                return _read_folder(folder)  # the mapped weights outlive the folder
        except OSError as error:
            raise BundleError(f"cannot read the bundle {path}: {error.strerror or error}") from error
        except (zipfile.BadZipFile, zlib.error, EOFError, struct.error, RuntimeError) as error:
            raise BundleError(f"{path} is damaged ({str(error)[:200]!r}); copy it again") from error
    raise BundleError(
        f"{path} is neither a folder nor a .zip file; expected a bundle, which `multiworld export` writes, "
        "with --weights FILE for other weights"
    )


def _read_folder(folder: Path) -> Bundle:
    manifest = Manifest.from_json(_checked(folder / MANIFEST, MAX_MANIFEST_BYTES).read_bytes())
    graph = Graph.from_json(_checked(folder / GRAPH, MAX_GRAPH_BYTES, manifest).read_bytes())
    manifest.check_graph(graph)
    check_in_child(lambda: check_graph(graph, manifest.lengths))
    weights_path = _checked(folder / WEIGHTS, graph.weights_bytes + _MAX_HEADER_BYTES, manifest)
    self_test_path = _checked(folder / SELF_TEST, _MAX_SELF_TEST_BYTES, manifest)
    try:
        weights = TensorFile(os.open(weights_path, os.O_RDONLY))
        weights.entries  # noqa: B018 - checks the header
        with safe_open(self_test_path, framework="pt") as tests:
            self_test = {name: tests.get_tensor(name).clone() for name in tests.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise BundleError(f"the tensors of the bundle cannot be read: {error}") from error
    bundle = Bundle(manifest, graph, self_test, weights)
    _check_weights(bundle)
    _check_self_test(bundle)
    return bundle


def _checked(path: Path, limit: int, manifest: Manifest | None = None) -> Path:
    """The path of a file of at most this size, with the digest of the manifest."""
    if not path.is_file() or path.is_symlink():
        raise BundleError(f"the bundle lacks the file {path.name}; expected what `multiworld export` writes")
    if (size := path.stat().st_size) > limit:
        raise BundleError(f"{path.name} of the bundle has {size} bytes; at most {limit} are expected")
    if manifest is not None and manifest.sha256.get(path.name) != _sha256_of(path):
        raise BundleError(f"{path.name} is damaged: its SHA-256 is not the manifest's; copy the bundle again")
    return path


def _sha256_of(path: Path) -> str:
    """The SHA-256 hash of a file, in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_weights(bundle: Bundle) -> None:
    """Raise BundleError unless every weight of the graph is there, as described, and not NaN."""
    with bundle.weights_file.tensors() as file:
        for node in bundle.graph.weights:
            tensor = node.check(file.get_tensor(node.key) if node.key in bundle.weights_file.entries else None)
            if any(part.isnan().any() for part in torch.split(tensor.flatten(), _CHUNK)):
                raise BundleError(f"the weight {node.key!r} contains NaN; export the model with other weights")


def _check_self_test(bundle: Bundle) -> None:
    """Raise BundleError unless there is one row of every input and of all that crosses a cut, and inputs and outputs are finite.

    Infinity may cross a cut: attention masks contain it.
    """
    rows = {f"input.{each.name}": each for each in bundle.manifest.inputs}
    for number, stage in enumerate(bundle.stages):
        rows |= {f"boundary.{number}.{index}": spec_of(stage.tensor(name)) for index, name in enumerate(stage.outputs)}
    if bundle.self_test.keys() != rows.keys():
        wrong = sorted(bundle.self_test.keys() ^ rows.keys())[0]
        raise BundleError(f"the self-test of the bundle lacks {wrong[:60]!r} or has it without need")
    last = f"boundary.{len(bundle.manifest.cuts)}."
    one_row = {**bundle.manifest.dimensions, BATCH: (1, 1)}
    for name, spec in rows.items():
        tensor = bundle.self_test[name]
        try:
            RowFormat((spec,), one_row).check([tensor])
        except BundleError as error:
            raise BundleError(f"the self-test of the bundle: {name!r}: {error}") from error
        crosses = name.startswith("boundary.") and not name.startswith(last)
        if not crosses and tensor.is_floating_point() and not tensor.isfinite().all().item():
            raise BundleError(f"the self-test of the bundle has infinity or NaN in {name!r}")


def _unpack(path: Path, folder: Path) -> None:
    """Unpack the four files of a bundle. Every size is bounded before it is unpacked; other names are refused."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if set(entries) != {MANIFEST, GRAPH, WEIGHTS, SELF_TEST} or len(archive.infolist()) != len(entries):
            raise BundleError(f"{path} does not contain exactly {MANIFEST}, {GRAPH}, {WEIGHTS} and {SELF_TEST}")
        limits = {MANIFEST: MAX_MANIFEST_BYTES, GRAPH: MAX_GRAPH_BYTES, SELF_TEST: _MAX_SELF_TEST_BYTES}
        for name in (MANIFEST, GRAPH, SELF_TEST, WEIGHTS):  # the weights last: the graph says how large they are
            limit = limits.get(name)
            if limit is None:
                limit = Graph.from_json((folder / GRAPH).read_bytes()).weights_bytes + _MAX_HEADER_BYTES
            entry = entries[name]
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & 1:
                raise BundleError(f"{name} in {path} is encrypted or packed in another way than by deflate")
            if entry.file_size > limit:
                raise BundleError(f"{name} in {path} has {entry.file_size} bytes, which is more than it may have")
            archive.extract(entry, folder)  # not more than `file_size`


def write_bundle(
    path: Path, manifest: Manifest, graph: Graph, weights: Mapping[str, Tensor], self_test: Mapping[str, Tensor]
) -> Manifest:
    """Write a bundle as a folder, or as a .zip file if `path` ends in .zip. The path appears only when the bundle is complete.

    Returns:
        The manifest with the digests of the files.
    Raises:
        BundleError: `path` exists, or cannot be written.
    """
    if path.exists():
        raise BundleError(f"{path} exists; choose another path or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise BundleError(f"cannot write to {path.parent}: {error.strerror}") from error
    try:
        (folder / GRAPH).write_text(graph.to_json(), encoding="utf-8")
        save_file({key: tensor.contiguous().clone() for key, tensor in weights.items()}, folder / WEIGHTS)
        save_file({key: tensor.contiguous().clone() for key, tensor in self_test.items()}, folder / SELF_TEST)
        digests = {name: _sha256_of(folder / name) for name in (GRAPH, WEIGHTS, SELF_TEST)}
        manifest = Manifest.from_json(msgspec.structs.replace(manifest, sha256=digests).to_json())
        (folder / MANIFEST).write_bytes(manifest.to_json())
        for made in folder.iterdir():
            made.chmod(0o644)
        if path.suffix.lower() == ".zip":
            packed = folder / "packed.zip"
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
                for name in (MANIFEST, GRAPH, WEIGHTS, SELF_TEST):
                    archive.write(folder / name, name)
            packed.rename(path)
        else:
            folder.chmod(0o755)
            folder.rename(path)
    except (OSError, SafetensorError) as error:
        raise BundleError(f"cannot write {path}: {getattr(error, 'strerror', error)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return manifest
