"""Generates the PrometheusRule resource of the Prometheus operator from deploy/prometheus/rules.

Run `python -m multiworld_serving.deploy.kubernetes.rules` after a change of the rules; a test checks that it was run.
"""

import sys
from pathlib import Path

RULES = Path(__file__).parents[1] / "prometheus" / "rules"
RESOURCE = Path(__file__).parent / "base" / "prometheus-rules.yaml"
_HEAD = """\
# Generated from deploy/prometheus/rules by `python -m multiworld_serving.deploy.kubernetes.rules`. Do not edit.
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
    """Return the resource as YAML. Groups are copied line by line, so formatting and comments are kept."""
    return _HEAD + "".join(_groups(path) for path in sorted(RULES.glob("*.yml")))


def _groups(path: Path) -> str:
    _, found, groups = path.read_text(encoding="utf-8").partition("\ngroups:\n")
    if not found:
        raise ValueError(f"{path} has no line `groups:`")
    return "".join(f"  {line}" if line.strip() else line for line in groups.splitlines(keepends=True))


def main() -> int:
    """Write the resource. Returns the exit status."""
    RESOURCE.write_text(rendered(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
