"""Errors of elastic worlds. The errors of all worlds are in multiworld/errors.py.

WorldError
└── ElasticError            this process is no longer a member; unfinished tensors hold their original values; it may join again
    ├── EvictedError        the world continues without this process
    ├── RendezvousError     the rendezvous server cannot be reached or does not know the world
    ├── ViewChangeError     no view formed in time, or a call exceeded its time limit
    └── DesyncError         the members call different operations: a bug of the application
"""

from multiworld.errors import WorldError


class ElasticError(WorldError):
    """This process is no longer a member of the elastic world. It may join again."""


class EvictedError(ElasticError):
    """The world continues without this process, which was frozen or disconnected, or did not ask for the next view in time."""


class RendezvousError(ElasticError):
    """The rendezvous server cannot be reached or does not know this world. A working view continues, but no other follows."""


class ViewChangeError(ElasticError):
    """No view formed in time, or a call exceeded its time limit."""


class DesyncError(ElasticError):
    """The members call different operations, pass different tensors, or some are one call ahead. A bug of the application."""
