"""Starts all ranks of an example in one terminal: python -m examples.launch all_reduce

Each output line is prefixed with the name of its rank. Ctrl-C ends all ranks. The launcher imports torch once and forks the ranks, so
they start within milliseconds. Apart from that, they run like the commands in examples/README.md.
"""

import argparse
import importlib
import itertools
import signal
import socket
import sys
from collections.abc import Sequence

from examples.elastic_members import MEMBERS
from examples.rank_processes import Fault, Rank, Runner, Terminal
from examples.two_worlds import WORLD_SIZE, add_network_options, place

ELASTIC = ("all_reduce_with_retry", "all_reduce_by_hand")
REJOINING = {"resnet", *ELASTIC, "ensemble"}
"""Examples in which a killed member can join again."""
EXAMPLES = (
    "send_recv",
    "broadcast",
    "reduce",
    "all_reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "ring_all_reduce",
    "single_world",
    "resnet",
    *ELASTIC,
    "ensemble",
    "data_parallel",
)
SINGLE_WORLD_SIZE = 5


def ranks_of(example: str, num_workers: int) -> list[Rank]:
    """Return the ranks of an example, without the arguments that are the same for all ranks."""
    module = f"examples.{example}.m8d" if example in ("resnet", "ensemble") else f"examples.{example}"
    if example == "single_world":
        return [_single_world_rank(rank) for rank in range(SINGLE_WORLD_SIZE)]
    if example == "resnet":
        worlds = range(1, num_workers + 1)
        leader = Rank("leader", tuple((index, 0) for index in worlds), module, ("--num_workers", str(num_workers)))
        return [leader, *(_member(module, (index, 1)) for index in worlds)]
    if example in ELASTIC:
        return [Rank("rendezvous", (), module, ()), *_elastic_members(module)]
    if example == "data_parallel":
        return _elastic_members(module)
    if example == "ensemble":
        front, client = (Rank(name, (), f"examples.ensemble.{name}", ()) for name in ("front", "client"))
        return [front, *_elastic_members(module), client]
    others = itertools.product((1, 2), range(1, WORLD_SIZE))
    return [_member(module, (1, 0), (2, 0)), *(_member(module, place) for place in others)]


def _single_world_rank(rank: int) -> Rank:
    arguments = ("--rank", str(rank), "--worldsize", str(SINGLE_WORLD_SIZE))
    return Rank(f"rank {rank}", ((1, rank),), "examples.single_world", arguments)


def _elastic_members(module: str) -> list[Rank]:
    """Return the members of an elastic world. They continue when another one is killed."""
    return [
        Rank(f"member {number}", ((1, number),), module, ("--number", str(number)), survives=True)
        for number in range(MEMBERS)
    ]


def _member(module: str, *places: tuple[int, int]) -> Rank:
    index, rank = places[0]
    infos = [("--worldinfo", f"{index},{rank}") for index, rank in places]
    label = "leader" if rank == 0 else f"world{index} rank {rank}"
    return Rank(label, places, module, tuple(itertools.chain.from_iterable(infos)))


def reserve_port(addr: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen: no other program gets the port, and rank 0 can still use it. Port 0: any free port."""
    sock = socket.socket(socket.AF_INET6 if ":" in addr else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((addr, port))
    return sock


def launch(example: str, options: argparse.Namespace, extra: Sequence[str]) -> bool:
    """Run an example. Returns whether all ranks ended with status 0, apart from those that the fault excuses."""
    ranks = ranks_of(example, options.num_workers)
    importlib.import_module(ranks[0].module)
    with reserve_port(options.addr, options.port) as reserved, reserve_port(options.addr, 0) as for_http:
        same = {
            "backend": options.backend,
            "addr": options.addr,
            "port": reserved.getsockname()[1],
            "steps": options.steps,
            "step-pause-s": options.step_pause_s,
        }
        if example == "ensemble":
            same["http-port"] = for_http.getsockname()[1]
        terminal = Terminal([*(rank.label for rank in ranks), "launcher"])
        arguments = [word for key, value in same.items() for word in (f"--{key}", str(value))]
        runner = Runner(terminal, [*arguments, *extra], _fault(example, ranks, options))
        try:
            runner.run(ranks)
        except KeyboardInterrupt:
            terminal.print("launcher", f"{example}: ended all ranks")
            sys.exit(130)
    terminal.print("launcher", f"{example}: {'a rank failed' if runner.failed else 'done'}")
    return not runner.failed


def _fault(example: str, ranks: Sequence[Rank], options: argparse.Namespace) -> Fault | None:
    if options.kill_rank is None:
        return None
    for rank in ranks:
        if options.kill_rank in rank.places:
            return Fault(rank, options.after_step, options.restart_after_s)
    index, number = options.kill_rank
    sys.exit(f"--kill-rank: {example} has no rank {number} in world {index}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.launch",
        description="Start all ranks of an example in one terminal.",
        epilog="Other options are passed to the example.",
    )
    parser.add_argument("example", nargs="+", choices=EXAMPLES, help="examples to run, one after another")
    add_network_options(parser)
    parser.set_defaults(port=0)  # any free port
    parser.add_argument("--num_workers", type=int, default=2, help="workers of resnet (default: %(default)s)")
    parser.add_argument("--kill-rank", type=place, metavar="WORLD,RANK", help="kill this rank")
    parser.add_argument(
        "--after-step", type=int, default=3, help="step after which it is killed (default: %(default)s)"
    )
    parser.add_argument("--restart-after-s", type=float, help="seconds after which it is started again")
    options, extra = parser.parse_known_args()
    if options.restart_after_s is not None and not set(options.example) <= REJOINING:
        parser.error(f"--restart-after-s: a killed rank can join again only in {', '.join(sorted(REJOINING))}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = [example for example in options.example if not launch(example, options, extra)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
