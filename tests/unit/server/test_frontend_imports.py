"""What the programs of frontends and workers import: nothing that only other programs need."""

import subprocess
import sys

_NOT_IN_A_FRONTEND = (
    "multiworld_serving.models.optimize",
    "multiworld_serving.models.export",
    "multiworld_serving.server.leader",
    "multiworld_serving.server.scheduling",
    "multiworld_serving.workers",
    "torch._dynamo",
    "torchvision",
    "grpc",
    "sympy",
)


_NOT_IN_A_WORKER = ("multiworld_serving.models.export", "multiworld_serving.server", "torchvision")


def imported_by(program: str) -> set[str]:
    code = f"import sys; import multiworld_serving.{program}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, timeout=100)
    return set(done.stdout.split())


def test_frontend_imports_no_module_of_leaders_and_no_compiler() -> None:
    imported = imported_by("server.frontends.main")
    assert "multiworld_serving.server.frontends.leader_pool" in imported
    assert not imported & set(_NOT_IN_A_FRONTEND)


def test_worker_imports_no_torchvision_and_no_export() -> None:
    imported = imported_by("workers.main")
    assert "multiworld_serving.models.optimize" in imported
    assert not imported & set(_NOT_IN_A_WORKER)
