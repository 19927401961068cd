"""Prometheus's rules as a resource of its operator. The rules stand in deploy/prometheus/rules alone; `python -m deploy.kubernetes.rules`
writes the resource anew after a change, and a test says when that was forgotten.
"""

import sys
from pathlib import Path

RULES = Path(__file__).parents[1] / "prometheus" / "rules"
RESOURCE = Path(__file__).parent / "base" / "prometheus-rules.yaml"
_HEAD = """\
# Made from deploy/prometheus/rules by `python -m deploy.kubernetes.rules`: change those.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: multiworld
  labels:
    app.kubernetes.io/name: multiworld
spec:
  groups:
"""


def rendered() -> str:
    """The resource as it should be. The groups go over line by line: what a person wrote there stays as it was written."""
    return _HEAD + "".join(_groups(path) for path in sorted(RULES.glob("*.yml")))


def _groups(path: Path) -> str:
    _, found, groups = path.read_text(encoding="utf-8").partition("\ngroups:\n")
    if not found:
        raise ValueError(f"{path} has no line `groups:`")
    return "".join(f"  {line}" if line.strip() else line for line in groups.splitlines(keepends=True))


def main() -> int:
    """Write it. Gives the exit status."""
    RESOURCE.write_text(rendered(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
