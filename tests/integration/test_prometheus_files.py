"""Prometheus and Alertmanager files: valid, tested with promtool, and every alert documented."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from multiworld_serving.server.leader.metrics import LeaderMetrics
from tests.programs import program

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
ALERTS = re.findall(r"- alert: (\w+)", (PROMETHEUS / "rules" / "alerts.yml").read_text())


def check(*command: str | Path, stdin: bytes | None = None) -> None:
    done = subprocess.run(command, input=stdin, capture_output=True, check=False, cwd=PROMETHEUS)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus.docker.yml", "prometheus.compose.yml"])
def test_configuration_is_valid(name: str) -> None:
    check(program("promtool"), "check", "config", name)


def test_kubernetes_configuration_is_valid_except_for_its_discovery(tmp_path: Path) -> None:
    text = (PROMETHEUS / "prometheus.kubernetes.yml").read_text()
    without, removed = re.subn(r"    kubernetes_sd_configs:\n(?:      .*\n)+", "", text)
    assert removed == 3, "of leaders, frontends and workers"
    shutil.copytree(PROMETHEUS / "rules", tmp_path / "rules")
    (tmp_path / "prometheus.yml").write_text(without)
    check(program("promtool"), "check", "config", tmp_path / "prometheus.yml")


def test_alertmanager_configuration_is_valid() -> None:
    check(program("amtool"), "check-config", DEPLOY / "alertmanager" / "alertmanager.yml")


@pytest.mark.parametrize("file", sorted((PROMETHEUS / "tests").glob("*.yml")), ids=lambda file: file.name)
def test_rules_pass_their_unit_tests(file: Path) -> None:
    check(program("promtool"), "test", "rules", file)


def test_metric_names_follow_the_prometheus_conventions() -> None:
    metrics = LeaderMetrics()
    metrics.link(0, 0).compute_s.observe(0.1)
    check(program("promtool"), "check", "metrics", stdin=metrics.text())


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_is_tested_and_has_a_runbook_section(alert: str) -> None:
    tests = "".join(file.read_text() for file in (PROMETHEUS / "tests").glob("*.yml"))
    fires = rf"alertname: {alert}\n\s+eval_time: [^\n]*\n\s+exp_alerts:\n\s+- exp_labels"
    stays = rf"alertname: {alert}, eval_time: \S+ exp_alerts: \[\]"
    assert re.search(rf"{fires}(?:(?!\n  - name:).)*{stays}", tests, re.DOTALL), (
        "no test in which it fires and resolves"
    )
    rule = (PROMETHEUS / "rules" / "alerts.yml").read_text().split(f"- alert: {alert}\n")[1].split("- alert:")[0]
    found = re.search(r"runbook_url: (docs/\w+\.md)#(\w+)\n", rule)
    assert found, "no runbook_url"
    headings = re.findall(r"^## (\w+)$", (DEPLOY.parent / found[1]).read_text(), re.MULTILINE)
    assert found[2] in [heading.lower() for heading in headings]
