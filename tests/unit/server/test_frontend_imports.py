"""What the programs of frontends and workers import: nothing that only other programs need."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_checks_of_the_supervisor_import_no_torch_so_that_it_can_fork_its_processes(tmp_path: Path) -> None:
    """torch starts threads at its import unless their number is set before, and a process with threads must not fork."""
    code = """import sys
from multiworld_serving.cli.verbs import processes
from multiworld_serving.server.supervisor import service
from multiworld_serving.models.cache_folder import cache_folder
cache_folder("bundles")
print(*sys.modules)"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=100, env=environment
    )
    assert "torch" not in done.stdout.split()
