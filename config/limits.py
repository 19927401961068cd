"""Limits of the process that the programs set at their start."""

import resource


def raise_descriptor_limit() -> None:
    """Allow as many open files as the system lets this process have.

    Every connection of a stranger to the port of a Gloo group holds a descriptor for as long as the process lives, and Gloo ends the
    process that has none left: a shell's usual 1,024 are few.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
