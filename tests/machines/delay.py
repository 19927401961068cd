"""A TCP relay that delays all data. Run as `python -m tests.machines.delay`.

It simulates a long-distance connection for kernels without `tc netem`. Connections are made and accepted on both sides without delay;
all later bytes, in both directions, arrive late and in order.
"""

import argparse
import asyncio
import contextlib
from collections import deque

_PIECE_BYTES = 1 << 16
_MAX_PIECES = 1024
"""Limit of the bytes in flight in one direction, as on a network path."""


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    pieces: deque[tuple[float, bytes]] = deque()
    room, news = asyncio.Semaphore(_MAX_PIECES), asyncio.Semaphore(0)

    async def deliver() -> None:
        while True:
            await news.acquire()
            due_s, data = pieces.popleft()
            await asyncio.sleep(due_s - loop.time())
            room.release()
            if not data:
                return
            writer.write(data)
            await writer.drain()

    delivering = asyncio.create_task(deliver())
    with contextlib.suppress(OSError):
        data = b"first"
        while data:
            await room.acquire()
            data = await reader.read(_PIECE_BYTES)
            pieces.append((loop.time() + delay_s, data))
            news.release()
        await delivering
        writer.write_eof()
    delivering.cancel()


async def _serve(host: str, port: int, target: tuple[str, int], delay_s: float) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(*target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            _forward(reader, there_writer, delay_s), _forward(there_reader, writer, delay_s), return_exceptions=True
        )
        writer.close()
        there_writer.close()

    async with await asyncio.start_server(accept, host, port) as server:
        print("listening", flush=True)
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True, help="HOST:PORT")
    parser.add_argument("--target", required=True, help="HOST:PORT")
    parser.add_argument("--delay-s", type=float, required=True, help="each way")
    given = parser.parse_args()
    host, _, port = given.listen.rpartition(":")
    target_host, _, target_port = given.target.rpartition(":")
    asyncio.run(_serve(host, int(port), (target_host, int(target_port)), given.delay_s))


if __name__ == "__main__":
    main()
