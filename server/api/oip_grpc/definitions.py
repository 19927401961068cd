"""The message classes of the protocol, made of the descriptor that `make proto` compiles from `open_inference.proto`.

Code that protoc generates works only with the release of protobuf it was generated for and the next one, and registers in protobuf's
default pool, where any other copy of the protocol in the process, such as Triton's client, has the same names. These classes have a
pool of their own.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

SERVICE = "inference.GRPCInferenceService"


class Method(NamedTuple):
    """The message classes of a method."""

    request: Any
    response: Any


def _methods() -> dict[str, Method]:
    compiled = (files("multiworld_serving.server.api.oip_grpc") / "open_inference.binpb").read_bytes()
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(compiled).file:
        pool.Add(file)
    service = pool.FindServiceByName(SERVICE)
    return {
        method.name: Method(GetMessageClass(method.input_type), GetMessageClass(method.output_type))
        for method in service.methods
    }


METHODS = _methods()
"""The methods of the service by name."""
