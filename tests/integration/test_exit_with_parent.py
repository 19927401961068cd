"""A process that ends with its parent, whatever the parent died of and whatever the process is doing."""

import os
import select
import signal
import subprocess
import sys

TIMEOUT_S = 60.0
CHILD = """
import os, signal, time
from multiworld_serving.common.config.process import exit_with_parent
exit_with_parent()
print(os.getpid(), flush=True)
{then}
time.sleep(1000)
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
time.sleep(1000)
"""


def test_stopped_process_ends_when_its_parent_is_killed() -> None:
    child = CHILD.format(then="os.kill(os.getpid(), signal.SIGSTOP)")
    with subprocess.Popen([sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            ended, _, _ = select.select([pidfd], [], [], TIMEOUT_S)
            assert ended
        finally:
            if not select.select([pidfd], [], [], 0)[0]:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def test_process_ends_at_once_when_its_parent_has_ended_before() -> None:
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    command = [sys.executable, "-c", CHILD.format(then="")]
    with open(read_fd, "rb") as stdin:
        ended = subprocess.run(command, stdin=stdin, capture_output=True, timeout=TIMEOUT_S, check=True)
    assert ended.stdout == b""
