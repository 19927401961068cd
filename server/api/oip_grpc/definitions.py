"""The message classes of the protocol, made of `open_inference.proto` when the module is imported.

Code that protoc generates works only with the release of protobuf it was generated for and the next one, and registers in protobuf's
default pool, where any other copy of the protocol in the process, such as Triton's client, has the same names. These classes have a
pool of their own.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_PACKAGE = "inference"
SERVICE = f"{_PACKAGE}.GRPCInferenceService"

_LINE = re.compile(
    r"message (?P<message>\w+) \{|oneof (?P<oneof>\w+) \{|(?P<end>\})"
    r"|(?P<repeated>repeated )?(?:map<string, (?P<value>\w+)>|(?P<type>\w+)) (?P<name>\w+) = (?P<number>\d+);"
)
_METHOD = re.compile(r"  rpc (\w+)\((\w+)\) returns \((\w+)\) \{\}")


class Method(NamedTuple):
    """The message classes of a method."""

    request: Any
    response: Any


def messages_of(proto: str) -> dict[str, Any]:
    """The classes of the messages of a .proto file, by name. The file has one declaration per line.

    Raises:
        ValueError: a line is not of the part of the language that `_LINE` describes.
    """
    file = FileDescriptorProto(name="open_inference.proto", package=_PACKAGE, syntax="proto3")
    open_blocks: list[FileDescriptorProto | DescriptorProto] = [file]
    lines = (line.partition("//")[0].strip() for line in proto[proto.index("\nmessage ") :].splitlines())
    for line in filter(None, lines):
        found, block = _LINE.fullmatch(line), open_blocks[-1]
        if found is None:
            raise ValueError(f"not understood: {line!r}")
        if name := found["message"]:
            open_blocks.append((block.message_type if block is file else block.nested_type).add(name=name))
        elif name := found["oneof"]:
            block.oneof_decl.add(name=name)
            open_blocks.append(block)
        elif found["end"]:
            open_blocks.pop()
        else:
            in_oneof = len(open_blocks) > 1 and block is open_blocks[-2]
            _add_field(block, found, in_oneof=in_oneof)
    pool = DescriptorPool()
    pool.Add(file)
    return {
        each.name: GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{each.name}")) for each in file.message_type
    }


def _add_field(message: DescriptorProto, found: re.Match[str], *, in_oneof: bool) -> None:
    kind = found["type"]
    if found["value"]:
        kind = f"{found['name'].title()}Entry"
        entry = message.nested_type.add(name=kind)
        entry.options.map_entry = True
        _set_type(entry.field.add(name="key", number=1, label=FieldDescriptorProto.LABEL_OPTIONAL), "string")
        _set_type(entry.field.add(name="value", number=2, label=FieldDescriptorProto.LABEL_OPTIONAL), found["value"])
    many = found["repeated"] or found["value"]
    label = FieldDescriptorProto.LABEL_REPEATED if many else FieldDescriptorProto.LABEL_OPTIONAL
    field = message.field.add(name=found["name"], number=int(found["number"]), label=label)
    if in_oneof:
        field.oneof_index = len(message.oneof_decl) - 1
    _set_type(field, kind)


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    scalar = getattr(FieldDescriptorProto, f"TYPE_{kind.upper()}", None)
    field.type = FieldDescriptorProto.TYPE_MESSAGE if scalar is None else scalar
    if scalar is None:
        field.type_name = kind


_PROTO = (files("multiworld_serving.server.api.oip_grpc") / "open_inference.proto").read_text(encoding="utf-8")
MESSAGES = messages_of(_PROTO)
METHODS = {name: Method(MESSAGES[given], MESSAGES[found]) for name, given, found in _METHOD.findall(_PROTO)}
"""The methods of the service by name."""
