"""A check that crashes, hangs or allocates without end ends a process of its own, and the caller gets one line."""

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from multiworld_serving.models.bundle.checking import check_in_child
from multiworld_serving.models.errors import BundleError


def crash() -> None:
    ctypes.string_at(0)


def allocate() -> None:
    torch.zeros(6 << 30, dtype=torch.uint8)


def hang() -> None:
    time.sleep(3600)


def refuse() -> None:
    raise BundleError("invalid graph: too deep")


def fail() -> None:
    raise KeyError("y")


def leave() -> None:
    os._exit(0)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (crash, "ended with SIGSEGV"),
        (allocate, "invalid graph: "),
        (hang, "within 0.5 s"),
        (refuse, "^invalid graph: too deep$"),
        (fail, "KeyError: 'y'"),
        (leave, "no reply"),
    ],
)
def test_check_that_ends_its_process_is_an_error(check: Callable[[], None], message: str) -> None:
    with pytest.raises(BundleError, match=message) as raised:
        check_in_child(check, deadline_s=0.5 if check is hang else 60)
    assert "\n" not in str(raised.value)


def kept() -> tuple[int, str]:
    """The number of descriptors, and the child processes."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/thread-self/children").read_text()


def test_check_that_passes_leaves_neither_processes_nor_descriptors() -> None:
    before = kept()
    for _ in range(3):
        check_in_child(lambda: None)
    assert kept() == before
