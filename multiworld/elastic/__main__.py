"""Runs a rendezvous: python -m multiworld.elastic --port 29600 --first-size 4 --state-file elastic.json"""

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
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with ElasticRendezvous(
        addr=options.addr,
        port=options.port,
        first_size=options.first_size,
        patience_s=options.patience_s,
        state_file=options.state_file,
        secret=secret,
    ) as rendezvous:
        logging.getLogger(__name__).info("listening on %s:%d", rendezvous.addr, rendezvous.port)
        await ended.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m multiworld.elastic", description="Run a rendezvous of elastic worlds."
    )
    parser.add_argument("--addr", default="127.0.0.1", help="where to listen (default: %(default)s)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 takes a free one (default: %(default)s)")
    parser.add_argument(
        "--first-size", type=int, default=1, help="members that a first epoch waits for (default: %(default)s)"
    )
    parser.add_argument(
        "--patience-s", type=float, default=10.0, help="for members that do not ask (default: %(default)s)"
    )
    parser.add_argument("--state-file", type=Path, help="remembers the members, so that it may be started again")
    parser.add_argument("--secret-file", type=Path, help="holds what members must know")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
