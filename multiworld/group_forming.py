"""Forms the world of a process group. Rank 0 listens at a given address, or publishes its address in a store of torch."""

import contextlib
import secrets
import time
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from multiworld.control.dial import local_host
from multiworld.control.handshake import WRONG_SECRET
from multiworld.errors import JoinError
from multiworld.manager import WorldManager
from multiworld.membership.acceptor import listen_on
from multiworld.progress import ProgressThread
from multiworld.world import World

ADDRESS_KEY = "multiworld/address"
"""Secret and address of rank 0 while its group forms. Empty afterwards, because a store has no delete that checks the value."""
_REREAD_S = 0.1
"""Interval at which a member that joins reads the key, which may hold the address of an earlier group."""


class _OutdatedError(Exception):
    """The store holds another address than that at which this member joins."""


def form(
    name: str,
    rank: int,
    size: int,
    address: tuple[str, int],
    timeout_s: float,
    manager: WorldManager,
    outdated: Callable[[], bool] = lambda: False,
) -> tuple[World, ProgressThread]:
    """Form a world of a new manager on a thread that will run its operations. Frees everything after an error.

    Raises the errors of `WorldManager.initialize_world`, and _OutdatedError when `outdated` returns True.
    """
    addr, port = address
    progress = ProgressThread(f"multiworld-{name}-progress", manager)
    try:
        progress.start()
        joining = progress.run(manager.initialize_world(name, rank, size, addr=addr, port=port, timeout=timeout_s))
        while not wait([joining], _REREAD_S).done:
            if outdated():
                raise _OutdatedError
        return joining.result(), progress
    except BaseException:
        progress.stop()
        progress.join()
        manager.cleanup()  # if the thread did not start
        raise


def form_through(
    store: Store, name: str, rank: int, size: int, timeout_s: float, settings: dict[str, Any]
) -> tuple[World, ProgressThread]:
    """Like `form`, with the address that rank 0 publishes in `store`. See `WorldProcessGroup.from_store`."""
    if rank:
        return _join_published(store, name, rank, size, timeout_s, settings)
    secret, addr = secrets.token_hex(16), _own_address(store)
    manager = make_manager(secret=secret, **settings)
    sock = listen_on((addr, 0))
    port = sock.getsockname()[1]
    published = f"{secret} {addr} {port}"
    try:
        store.set(ADDRESS_KEY, published)  # early, so that the others connect while the threads start here
        manager.listen(addr, port, sock)
        return form(name, rank, size, (addr, port), timeout_s, manager)
    except BaseException:
        manager.cleanup()
        sock.close()
        raise
    finally:
        with contextlib.suppress(RuntimeError):  # the store is lost, or has no `compare_set`
            store.compare_set(ADDRESS_KEY, published, "")  # unless the next rank 0 has published its address


def _join_published(
    store: Store, name: str, rank: int, size: int, timeout_s: float, settings: dict[str, Any]
) -> tuple[World, ProgressThread]:
    """Join at the address in the store. Starts over if another address is published before the group has formed."""
    until_s, published = time.monotonic() + timeout_s, ""

    def is_outdated() -> bool:
        with contextlib.suppress(RuntimeError):  # the store is lost
            return store.get(ADDRESS_KEY).decode() not in ("", published)
        return False

    while True:
        try:
            published = _read_address(store, published, until_s)
        except (RuntimeError, TimeoutError) as error:
            reason = f"rank 0 has not published its address within {timeout_s:g} s: {error}"
            raise JoinError(name, reason) from error
        secret, addr, port = published.split()
        manager, left_s = make_manager(secret=secret, **settings), round(max(0.0, until_s - time.monotonic()), 2)
        try:
            return form(name, rank, size, (addr, int(port)), left_s, manager, is_outdated)
        except _OutdatedError:
            pass
        except JoinError as error:
            if WRONG_SECRET not in error.message:  # else another group has the port now
                raise


def make_manager(*, heartbeat_timeout_s: float = 10.0, **settings: Any) -> WorldManager:
    return WorldManager(heartbeat_timeout_s=heartbeat_timeout_s, **settings)


def _read_address(store: Store, former: str, until_s: float) -> str:
    """Wait for an address other than `former`, and return its text. Raises TimeoutError after `until_s`, and RuntimeError of the store."""
    store.wait([ADDRESS_KEY], timedelta(seconds=max(0.001, until_s - time.monotonic())))
    while (published := store.get(ADDRESS_KEY).decode()) in ("", former):
        if time.monotonic() > until_s:
            raise TimeoutError("the store has the address of an earlier group")
        time.sleep(_REREAD_S)
    return published


def _own_address(store: Store) -> str:
    """Return the local address of the route to the store. A store without an address, such as a FileStore, gets the loopback address."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    return local_host(host, port) if host else "127.0.0.1"
