"""What the program of a frontend imports: nothing that only leaders and workers need."""

import subprocess
import sys

_PROGRAM = """
import sys
import multiworld_serving.server.frontends.main
print(*sys.modules)
"""
_NOT_IN_A_FRONTEND = (
    "multiworld_serving.models.optimize",
    "multiworld_serving.models.stages",
    "multiworld_serving.models.weights.loading",
    "multiworld_serving.server.leader",
    "multiworld_serving.server.pipeline",
    "multiworld_serving.server.replicas",
    "multiworld_serving.server.scheduling",
    "multiworld_serving.server.versions",
    "multiworld_serving.server.frontends.sessions",
    "multiworld_serving.workers",
    "torch._dynamo",
    "torch._inductor",
    "torchvision",
    "grpc",
    "google.protobuf",
    "sympy",
)


def test_frontend_imports_no_module_of_leaders_and_no_compiler() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    imported = set(subprocess.run(command, capture_output=True, check=True, text=True, timeout=100).stdout.split())
    assert "multiworld_serving.server.frontends.leader_pool" in imported
    assert not imported & set(_NOT_IN_A_FRONTEND)
