"""The four dashboards: *Service*, *Pipeline*, *Failures*, *Workers*.

    python -m deploy.grafana.dashboards

writes them to `dashboards/*.json`, which Grafana reads; a test keeps the two equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana.failures import failures
from deploy.grafana.pipeline import pipeline
from deploy.grafana.service import service
from deploy.grafana.workers import workers

FOLDER = Path(__file__).parent / "dashboards"


def as_json(dashboard: Dashboard) -> str:
    """As Grafana reads it from a file."""
    fields: dict[str, Any] = json.loads(json.dumps(dashboard.build(), cls=JSONEncoder))
    for position, panel in enumerate(fields["panels"], start=1):
        panel["id"] = position
    for annotation in fields["annotations"]["list"]:
        # Grafana's schema leaves these to the data source; Prometheus's draws an event's words from them.
        annotation |= {"step": "15s", "titleFormat": annotation["name"], "tagKeys": "stage,replica,cause"}
    return json.dumps(fields, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


DASHBOARDS: dict[str, Callable[[], Dashboard]] = {
    "service": service,
    "pipeline": pipeline,
    "failures": failures,
    "workers": workers,
}


def main() -> None:
    """Write them all."""
    for name, dashboard in DASHBOARDS.items():
        (FOLDER / f"{name}.json").write_text(as_json(dashboard()))


if __name__ == "__main__":
    main()
