"""What `multiworld serve` prints on standard output when it is ready, after the line with the model."""

from multiworld_serving.server.settings import EXAMPLE, ServeSettings


def banner(settings: ServeSettings, *, http_url: str, admin_url: str, joins: str, grpc: str = "") -> str:
    """Return five or six lines: processes, addresses, and how to send a request.

    Args:
        joins: HOST:PORT of the leaders' join ports, separated by commas.
        grpc: HOST:PORT of the gRPC port; empty = none.
    """
    spares = f" + {_count(settings.spares, 'spare')}" if settings.spares else ""
    workers = "workers of other machines" if settings.external_workers else settings.device
    pipeline = (
        f"{_count(settings.stages, 'stage')} x {_count(settings.replicas, 'replica')}{spares} on {workers}, "
        f"{_count(settings.leaders, 'leader')}, {_count(settings.frontends, 'frontend')}"
    )
    key = " -H 'Authorization: Bearer KEY'" if settings.needs_keys else ""
    rows = {
        "pipeline": pipeline,
        "HTTP API": f"{http_url} (status page in a browser)",
        **({"gRPC": f"{grpc} (Open Inference Protocol)"} if grpc else {}),
        "admin port": f"{admin_url} (metrics, multiworld rolling-restart, multiworld load-version)",
        "join port": joins,
        "try": f"curl -s{key} {http_url}{EXAMPLE}",
    }
    return "".join(f"  {name:<11} {text}\n" for name, text in rows.items())


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
