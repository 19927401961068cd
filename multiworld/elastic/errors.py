"""Errors of elastic worlds. The errors of all worlds are in multiworld/errors.py.

WorldError
└── ElasticError            this process is no longer a member; unfinished tensors hold their original values; join again to go on
    ├── EvictedError        the world continues without this process, which was frozen, disconnected or too late for an epoch
    ├── RendezvousError     the rendezvous cannot be reached or does not know the world
    ├── ReformError         no epoch formed within `reform_timeout_s`
    └── DesyncError         the members call different operations: a bug of the application
"""

from multiworld.errors import WorldError


class ElasticError(WorldError):
    """This process is no longer a member of the elastic world. It may join again."""


class EvictedError(ElasticError):
    """The world continues without this process, which was frozen or disconnected, or asked too late. It may join again as a newcomer."""


class RendezvousError(ElasticError):
    """The rendezvous cannot be reached or does not know this world. A working epoch continues, but no other follows."""


class ReformError(ElasticError):
    """No epoch formed in time."""


class DesyncError(ElasticError):
    """The members call different operations, pass different tensors, or some are one call ahead. A bug of the application."""
