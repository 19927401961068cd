"""Runs a rendezvous server: python -m multiworld.elastic --port 29600 --initial-members 4 --state-file elastic.json"""

import argparse
import asyncio
import contextlib
import logging
import signal
from pathlib import Path

from multiworld.elastic.rendezvous import DEFAULT_PORT, ElasticRendezvous


async def serve(options: argparse.Namespace) -> None:
    """Run until SIGTERM or SIGINT."""
    secret = options.secret_file.read_text().strip() if options.secret_file else ""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with ElasticRendezvous(
        addr=options.addr,
        port=options.port,
        initial_members=options.initial_members,
        regroup_timeout_s=options.regroup_timeout_s,
        state_file=options.state_file,
        secret=secret,
    ) as rendezvous:
        logging.getLogger(__name__).info("listening on %s:%d", rendezvous.addr, rendezvous.port)
        await stopped.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m multiworld.elastic", description="Run a rendezvous server of elastic worlds."
    )
    parser.add_argument("--addr", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 chooses a free port (default: %(default)s)")
    parser.add_argument(
        "--initial-members", type=int, default=1, help="members with which a world starts (default: %(default)s)"
    )
    parser.add_argument(
        "--regroup-timeout-s",
        type=float,
        default=10.0,
        help="limit for members to ask for the next view (default: %(default)s)",
    )
    parser.add_argument("--state-file", type=Path, help="stores the views, so that this process can be restarted")
    parser.add_argument("--secret-file", type=Path, help="file with the secret of all members")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
