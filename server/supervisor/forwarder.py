"""What remains of a supervisor after an upgrade: forwards signals to its successor, and ends with the status of the successor.

    python -I forwarder.py PID

It runs for as long as the service, so it imports the standard library only.
"""

import contextlib
import os
import signal
import sys

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
"""They are forwarded. The supervisor blocks them before it executes this program."""


def main(pid: int) -> int:
    """Forward signals to the child `pid` until it has ended. Returns its exit status, as a shell reports it."""

    def forward(signum: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signum)

    for signum in SIGNALS:
        signal.signal(signum, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
