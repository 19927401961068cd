"""What can go wrong with an elastic world, beyond what can with any (multiworld/errors.py).

WorldError
└── ElasticError            this process is no member any more; what is not finished holds what it held before. Join again
    ├── EvictedError        the world goes on without us: frozen, cut off, or too late for the next epoch
    ├── RendezvousError     who decides the next epoch cannot be reached, or has forgotten the world
    ├── ReformError         no epoch formed within `reform_timeout_s`
    └── DesyncError         the members do not do the same: a bug of the program
"""

from multiworld.errors import WorldError


class ElasticError(WorldError):
    """This process is no member of the elastic world any more."""


class EvictedError(ElasticError):
    """The world goes on without us: we were frozen or cut off for too long, or did not ask in time. Joining again makes us a newcomer."""


class RendezvousError(ElasticError):
    """The rendezvous cannot be reached, or has forgotten this world. An epoch that is well goes on without it; no other follows."""


class ReformError(ElasticError):
    """No epoch formed in time."""


class DesyncError(ElasticError):
    """The members do not do the same: other operations, other tensors, or some are a call ahead. A bug of the program."""
