"""`multiworld serve`, `frontend`, `leader` and `worker`: the processes of the service."""

from functools import partial
from typing import TYPE_CHECKING

from multiworld_serving.cli import command
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.logs import configure_logging
from multiworld_serving.common.config.settings import Options, setting
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.settings.serve import FrontendSettings, ServeSettings
from multiworld_serving.common.settings.worker import WorkerSettings

if TYPE_CHECKING:
    from types import ModuleType


def serve(settings: ServeSettings) -> int:
    """Serve a model over HTTP, split into pipeline stages with several replicas each.

    Starts frontends, leaders and workers as processes and restarts those that end. When a worker dies, hangs or loses its network,
    another replica of its stage computes its batches; when a leader does, its requests go to another leader.
    Every option can also be set in the environment, as MULTIWORLD_STAGES for --stages, or in a TOML file. The command line takes
    precedence over the environment, and the environment over the file. Ctrl-C drains and stops the service, with exit status 0; a second
    Ctrl-C ends all processes immediately.

    Examples:
        multiworld serve --weights auto
        multiworld serve --model resnet18 --stages 3 --replicas 2 --leaders 2 --weights random:0
        multiworld serve --external-workers --join-host 0.0.0.0 --token-file token
        multiworld serve --launcher ray --stages 2 --replicas 2 --leaders 2 --frontends 2 --device cuda
        curl -F image=@photo.jpg http://127.0.0.1:8000/predict
    """
    if settings.launcher == "ray":
        return int(_ray_launcher().serve(settings))
    from multiworld_serving.server.supervisor.service import run

    return run(settings, partial(command.run, {each.__name__: each for each in (frontend, leader, worker)}))


def _ray_launcher() -> "ModuleType":
    """The module that runs a service on Ray. Raises UserError if Ray is not installed."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise UserError(
            "Ray is not installed, which --launcher ray and `multiworld down` need: pip install 'multiworld-serving[ray]'"
        ) from error
    from multiworld_serving.deploy.ray import launcher

    return launcher


class DownOptions(Options):
    """Options of `down`."""

    ray_namespace: str = setting("multiworld", has_variable=True)
    """Namespace that the service was started with."""
    timeout_s: float = setting(60.0, gt=0)
    """Time for the processes of each role to stop; what still runs then is killed."""


def down(options: DownOptions) -> int:
    """Stop a service that `multiworld serve --launcher ray` has started, on the cluster of RAY_ADDRESS or of this machine.

    Frontends stop first and answer the requests that they have, then leaders and workers.

    Examples:
        RAY_ADDRESS=10.0.0.1:6379 multiworld down
    """
    launcher = _ray_launcher()
    configure_logging("info", process="down")
    launcher.down(options.ray_namespace, options.timeout_s)
    return 0


def frontend(settings: FrontendSettings) -> int:
    """Serve HTTP: read requests, decode images, and send them to a leader. If a leader is lost, its requests go to another one.

    Examples:
        multiworld frontend --leader 10.0.0.1:8001 --leader 10.0.0.2:8001 --host 0.0.0.0 --token-file token
    """
    from multiworld_serving.server.frontend.main import run

    return run(settings)


def leader(settings: LeaderSettings) -> int:
    """Schedule the requests of frontends over workers. Frontends and workers join at the same port.

    Several leaders of one model share nothing and use the same workers: name all of them to each frontend and worker.

    Examples:
        multiworld leader --model resnet18 --weights random:0 --join-host 0.0.0.0 --token-file token
    """
    from multiworld_serving.server.leader.main import run

    return run(settings)


def worker(settings: WorkerSettings) -> int:
    """Join a leader and compute the stage that it assigns, until stopped.

    A worker needs the address of the leader and the join token, but no model files. If the leader fails, the worker rejoins
    as soon as a leader is available. On SIGTERM or Ctrl-C it finishes its batches and leaves.

    Examples:
        multiworld worker --leader 10.0.0.1:8001 --token-file token
        MULTIWORLD_TOKEN=… multiworld worker --leader leader:8001 --device cuda:0
    """
    from multiworld_serving.workers.main import run

    return run(settings)
