"""A TCP relay before a leader's join port, to cut a worker's control connection in one or both directions, and to heal it."""

import selectors
import socket
import threading
from typing import Literal, Self

Direction = Literal["to_leader", "to_worker"]


class Relay:
    """Forwards between clients of `address` and the target, on its own thread. Data sent during a cut is held back and delivered
    after the cut has healed, as with TCP.

    Args:
        target: HOST:PORT.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._stopping = False
        self._flows = {"to_leader": threading.Event(), "to_worker": threading.Event()}
        self._sockets: set[socket.socket] = {self._server}
        self._threads: list[threading.Thread] = []
        self.connections = 0
        """Number of connections so far."""
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.heal()

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self.heal()
        for thread in self._threads:
            thread.join(10)
        for sock in self._sockets:
            sock.close()

    def cut(self, *directions: Direction) -> None:
        """Stop forwarding in this direction; all connections stay open."""
        for direction in directions:
            self._flows[direction].clear()

    def heal(self) -> None:
        for flow in self._flows.values():
            flow.set()

    def _spawn(self, target, *args: object) -> None:  # type: ignore[no-untyped-def]
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while self._readable(self._server):
            worker, _ = self._server.accept()
            try:
                leader = socket.create_connection(self._target, 10)
            except OSError:
                worker.close()
                continue
            self._sockets |= {worker, leader}
            self.connections += 1
            self._spawn(self._forward, worker, leader, "to_leader")
            self._spawn(self._forward, leader, worker, "to_worker")

    def _forward(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        try:
            while self._readable(source) and (data := source.recv(1 << 16)):
                self._flows[direction].wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def _readable(self, sock: socket.socket) -> bool:
        """Wait until it is readable; False when the relay is stopping."""
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            while not self._stopping:
                if selector.select(0.1):
                    return True
        return False
