"""What the programs of frontends and workers import: nothing that only other programs need."""

import subprocess
import sys

import pytest

NEEDLESS = {
    "server.frontend.main": {
        *(f"multiworld_serving.{name}" for name in ("models.optimize", "models.export", "workers")),
        *("multiworld_serving.server.leader", "multiworld_serving.server.supervisor"),
        *("torch._dynamo", "torchvision", "grpc", "sympy"),
    },
    "workers.main": {"multiworld_serving.models.export", "multiworld_serving.server", "torchvision"},
}


@pytest.mark.parametrize("program", NEEDLESS)
def test_program_imports_no_module_of_others_and_no_compiler(program: str) -> None:
    code = f"import sys; import multiworld_serving.{program}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=100)
    imported = set(done.stdout.split())
    assert f"multiworld_serving.{program}" in imported
    assert not imported & NEEDLESS[program]
