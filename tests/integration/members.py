"""Members of worlds as separate processes that execute commands of a test.

One process imports torch and forks the members; a fork costs milliseconds. Test and member exchange lines of JSON over a socket pair.
Every command of `Script` can be called on a `Member`:

    await member.do("join", world="w", rank=1, size=2, port=port)
    values = await member.do("recv", world="w", src=0)

Errors of the library are raised in the test as in the member.
"""

import asyncio
import atexit
import contextlib
import ctypes
import gc
import json
import os
import pickle
import resource
import signal
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

import multiworld
from multiworld import WorldManager
from multiworld.membership.forming import Forming
from tests.integration.elastic_part import ElasticPart
from tests.nursery import NURSERY, ForkedProcess
from tests.torture.part import TorturePart
from tests.waiting import until

PATIENCE_S = 60.0
"""Time limit of every wait. Generous, because no test measures speed."""


def resources() -> dict[str, int]:
    """Threads (without asyncio's pool, which grows on demand), open descriptors and anonymous memory (KiB) of this process.

    Before that, it releases what can be released.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    pool = sum(thread.name.startswith("asyncio_") for thread in threading.enumerate())
    return {
        "threads": int(fields["Threads"]) - pool,
        "fds": len(os.listdir("/proc/self/fd")),
        "memory_kib": int(fields["RssAnon"].split()[0]),
    }


# -- in the member -----------------------------------------------------------------------------------------------------------


class Script(TorturePart, ElasticPart):
    """The commands of a member: each public method. The return value is sent back as JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = WorldManager()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.strangers: list[socket.socket] = []
        self.events: list[list[Any]] = []
        self._listen_to_events()

    def _listen_to_events(self) -> None:
        stream = self.manager.events()

        async def collect() -> None:
            async for event in stream:
                self.events.append([event.kind, event.world_name, event.generation, event.cause, event.rank])

        task = asyncio.get_running_loop().create_task(collect())
        self.tasks.add(task)

    async def configure(self, **settings: Any) -> None:
        """Use a new manager with these settings."""
        self.manager = WorldManager(**settings)
        self._listen_to_events()

    async def join(self, world: str, rank: int, size: int, **settings: Any) -> int:
        return (await self.manager.initialize_world(world, rank, size, timeout=PATIENCE_S, **settings)).generation

    async def listen(self) -> int:
        return self.manager.listen()

    async def send(self, world: str, dst: int, value: float = 1.0, count: int = 4, tag: int = 0) -> None:
        await self.manager.communicator.send(torch.full((count,), value), dst, world, tag=tag)

    async def recv_slowly(self, world: str, src: int, seconds: float) -> None:
        """Receive a message with a callback that blocks; signals its start so that a test can observe it."""

        def check(_header: bytes, _size_bytes: int) -> None:
            os.write(2, b"the loop stands still\n")
            time.sleep(seconds)

        await self.manager.worlds[world].recv_view(check, src)

    async def recv(self, world: str, src: int, count: int = 4, tag: int = 0) -> list[float]:
        """The distinct values of the received tensor."""
        tensor = torch.full((count,), float("nan"))
        await self.manager.communicator.recv(tensor, src, world, tag=tag)
        return sorted(set(tensor.tolist()))

    async def echo(self, world: str, peer: int) -> int:
        """Send each received value back plus one until the world ends. Returns the number of messages."""
        tensor, count = torch.zeros(4), 0
        with contextlib.suppress(multiworld.WorldError):
            while True:
                await self.manager.communicator.recv(tensor, peer, world)
                await self.manager.communicator.send(tensor + 1, peer, world)
                count += 1
        return count

    async def freeze_while_connecting(self, connected: bool) -> None:
        """Stop this process once, before or after it has opened its first peer connection."""
        step = "_add" if connected else "_dial"
        original = getattr(Forming, step)

        def freeze(forming: Forming, *arguments: Any) -> Any:
            setattr(Forming, step, original)
            os.kill(os.getpid(), signal.SIGSTOP)
            return original(forming, *arguments)

        setattr(Forming, step, freeze)

    async def return_what_comes(self, world: str, peer: int, count: int, tag: int) -> None:
        tensor = torch.zeros(count)
        await self.manager.communicator.recv(tensor, peer, world, tag=tag)
        await self.manager.communicator.send(tensor, peer, world, tag=tag)

    async def close(self, world: str) -> None:
        await self.manager.close_world(world)

    async def event(self, kind: str, world: str) -> list[Any]:
        """Wait for the event of this kind of this world and return it."""
        await until(lambda: any(event[:2] == [kind, world] for event in self.events))
        return next(event for event in self.events if event[:2] == [kind, world])

    async def block(self, seconds: float) -> None:
        """Block the event loop; signals its start so that a test can observe it."""
        os.write(2, b"the loop stands still\n")
        time.sleep(seconds)  # noqa: ASYNC251

    async def flood(self, port: int, greetings: list[str], count: int) -> None:
        """Open connections to this port, send one of `greetings` (hex) on each, and keep them open until this process ends."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        for number in range(count):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.sendall(bytes.fromhex(greetings[number % len(greetings)]))
            self.strangers.append(sock)

    async def threads(self) -> list[str]:
        return sorted(thread.name for thread in threading.enumerate())

    async def no_new_threads(self) -> None:
        """Behave like Python 3.12 during shutdown: no thread can be started."""

        def start(_thread: threading.Thread) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

        def forbid() -> None:
            threading.Thread.start = start  # type: ignore[method-assign,assignment]

        atexit.register(forbid)  # runs before earlier registrations, such as multiworld's own

    async def fork_a_child_that_ends(self) -> int:
        """Fork a child that exits normally and return its exit status."""
        pid = os.fork()
        if pid == 0:
            try:
                atexit._run_exitfuncs()
                os._exit(0)
            finally:
                os._exit(1)
        async with asyncio.timeout(PATIENCE_S):
            fd = os.pidfd_open(pid)
            await _readable(fd)
            os.close(fd)
        return os.waitstatus_to_exitcode(os.waitpid(pid, os.WNOHANG)[1])  # noqa: ASYNC222 - it has ended

    async def fork_a_child_that_stays(self) -> int:
        """Fork a child that sleeps until it is killed and return its process id."""
        pid = os.fork()
        if pid == 0:
            while True:
                signal.pause()
        return pid


def _pickled(error: BaseException) -> str:
    """An expected error as it is; another one as a RuntimeError with its traceback."""
    if isinstance(error, asyncio.CancelledError):
        error = InterruptedError()  # a CancelledError would look like a cancellation of the test itself
    if not isinstance(error, multiworld.MultiWorldError | OSError | ValueError):
        error = RuntimeError("".join(traceback.format_exception(error)))
    return pickle.dumps(error).hex()


async def _perform(sock: socket.socket) -> None:
    """Execute commands until the test sends `end` or disconnects."""
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    script = Script()
    running: dict[int, asyncio.Task[None]] = {}

    async def run(number: int, command: str, arguments: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"id": number}
        try:
            reply["result"] = await getattr(script, command)(**arguments)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            reply["error"] = _pickled(error)
        writer.write(json.dumps(reply).encode() + b"\n")

    while line := await reader.readline():
        call = json.loads(line)
        if call["command"] == "end":
            return
        if call["command"] == "cancel":
            running[call["arguments"]["number"]].cancel()
            continue
        task = asyncio.create_task(run(call["id"], call["command"], call["arguments"]))
        running[call["id"]] = task


def perform(talk: int) -> None:
    """In a forked process: take commands over this socket."""
    asyncio.run(_perform(socket.socket(fileno=talk)))


# -- in the test -------------------------------------------------------------------------------------------------------------


class Member:
    """A process that takes commands."""

    def __init__(self, process: ForkedProcess, sock: socket.socket, stderr: Path) -> None:
        self.pid = process.pid
        self._process = process
        self._sock = sock
        self._stderr = stderr
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        self._disposed = False

    async def connect(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._sock)
        self._reading = asyncio.create_task(self._read(reader))

    def start(self, command: str, **arguments: Any) -> asyncio.Task[Any]:
        """Send a command and return a task that awaits its result. Cancelling the task cancels the command in the member."""
        self._last += 1
        number = self._last
        reply = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        self._tell(number, command, arguments)
        task = asyncio.create_task(self._answer(number, reply))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # some tests never await the result
        return task

    async def do(self, command: str, **arguments: Any) -> Any:
        """Send a command and await its result. Raises what the command raised in the member."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.start(command, **arguments)

    def signal(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    async def stopped(self) -> None:
        """Wait until SIGSTOP has stopped the process with all its threads."""
        await until(lambda: _stopped(self.pid))

    async def end(self) -> int:
        """Let the program end normally, without explicit clean-up. Returns the exit status."""
        self._tell(0, "end", {})
        return await self.ended()

    async def ended(self) -> int:
        """Exit status; negative for a signal, as in `subprocess`."""
        async with asyncio.timeout(PATIENCE_S):
            if self._process.returncode is None:
                await _readable(self._process.pidfd)
        return self._process.wait()

    @property
    def complaints(self) -> str:
        """The content of its stderr."""
        return self._stderr.read_text()

    async def dispose(self) -> None:
        """Kill the process and free its resources. Idempotent."""
        if self._disposed:
            return
        self._disposed = True
        self.kill()
        await self.ended()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def _tell(self, number: int, command: str, arguments: dict[str, Any]) -> None:
        assert self._writer is not None
        line = json.dumps({"id": number, "command": command, "arguments": arguments})
        self._writer.write(line.encode() + b"\n")

    async def _answer(self, number: int, reply: asyncio.Future[Any]) -> Any:
        try:
            return await asyncio.shield(reply)
        except asyncio.CancelledError:
            self._tell(0, "cancel", {"number": number})
            raise

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                reply = json.loads(line)
                future = self._replies.pop(reply["id"])
                if "error" in reply:
                    future.set_exception(pickle.loads(bytes.fromhex(reply["error"])))
                else:
                    future.set_result(reply["result"])
        for future in self._replies.values():
            future.set_exception(EOFError(f"member {self.pid} ended; it wrote: {self.complaints[-2000:]}"))
        self._replies.clear()


def _stopped(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread has just ended
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
    return False


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(fd)


Spawn = Callable[..., Awaitable[Member]]
"""Creates a member; keyword arguments are passed to its WorldManager."""


@contextlib.asynccontextmanager
async def members(folder: Path, **defaults: Any) -> AsyncIterator[Spawn]:
    """A function that creates members. All are killed at the end of the test. `defaults` are passed to their WorldManagers."""
    made: list[Member] = []

    async def make(**settings: Any) -> Member:
        stderr = folder / f"member{len(made)}.stderr"
        ours, theirs = socket.socketpair()
        with theirs, stderr.open("wb") as log:
            pid = NURSERY.fork(f"{__name__}:perform", (), log.fileno(), theirs.fileno())
        member = Member(ForkedProcess(pid), ours, stderr)
        made.append(member)
        await member.connect()
        if settings or defaults:
            await member.do("configure", **defaults | settings)
        return member

    try:
        yield make
    finally:
        for member in made:
            await member.dispose()


@contextlib.asynccontextmanager
async def managers(count: int, **settings: Any) -> AsyncIterator[list[WorldManager]]:
    """Managers with these settings in the test's process. No test freezes them."""
    patient = {"heartbeat_timeout_s": PATIENCE_S, **settings}
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(WorldManager(**patient)) for _ in range(count)]


async def form(world: str, port: int, *everybody: Member | WorldManager) -> int:
    """Join these members to `world` as ranks 0, 1, 2, …; returns its generation."""
    joining = [
        member.start("join", world=world, rank=rank, size=len(everybody), port=port)
        if isinstance(member, Member)
        else asyncio.create_task(member.initialize_world(world, rank, len(everybody), port=port, timeout=PATIENCE_S))
        for rank, member in enumerate(everybody)
    ]
    joined = await asyncio.gather(*joining)
    return max(each if isinstance(each, int) else each.generation for each in joined)
