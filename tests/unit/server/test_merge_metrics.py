"""Metrics of several processes in one exposition: a label says which process a sample is from."""

from prometheus_client.parser import text_string_to_metric_families

from multiworld_serving.common.metrics import merge_metrics

LEADER = """\
# HELP requests_total Requests.
# TYPE requests_total counter
requests_total{outcome="ok"} 3.0
requests_total{outcome="say \\"}\\\\ no"} 1.0
# HELP up_seconds Uptime.
# TYPE up_seconds gauge
up_seconds 1.5e+03
"""
FRONTEND = """\
# HELP requests_total Requests.
# TYPE requests_total counter
requests_total{outcome="ok"} 5.0
# HELP latency_seconds Latency.
# TYPE latency_seconds histogram
latency_seconds_bucket{le="0.5"} 1.0
latency_seconds_bucket{le="+Inf"} 2.0
latency_seconds_count 2.0
latency_seconds_sum 0.75
"""


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Value by name and labels, as Prometheus' own parser reads them."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_samples_say_which_process_they_are_from() -> None:
    merged = merge_metrics([("leader-0", "", LEADER), ("frontend-0", "", FRONTEND)])
    found = samples(merged)
    assert found["requests_total", frozenset({("outcome", "ok"), ("process", "leader-0")})] == 3
    assert found["requests_total", frozenset({("outcome", "ok"), ("process", "frontend-0")})] == 5
    assert found["requests_total", frozenset({("outcome", 'say "}\\ no'), ("process", "leader-0")})] == 1
    assert found["up_seconds", frozenset({("process", "leader-0")})] == 1500
    assert found["latency_seconds_bucket", frozenset({("le", "+Inf"), ("process", "frontend-0")})] == 2
    assert len(found) == 8


def test_samples_of_leaders_say_which_model_they_serve() -> None:
    with_model = 'model_version{model="m",number="1"} 1\nsubmodel{submodel="x"} 2\n'
    found = samples(merge_metrics([("leader-0", 'say "m"', LEADER), ("leader-1", "other", with_model)]))
    assert found["up_seconds", frozenset({("process", "leader-0"), ("model", 'say "m"')})] == 1500
    assert found["model_version", frozenset({("process", "leader-1"), ("model", "m"), ("number", "1")})] == 1
    assert found["submodel", frozenset({("process", "leader-1"), ("model", "other"), ("submodel", "x")})] == 2


def test_families_are_described_once_and_their_samples_are_together() -> None:
    lines = merge_metrics([("a", "m", LEADER), ("b", "", FRONTEND), ("c", "m", LEADER)]).splitlines()
    described = [tuple(line.split()[1:3]) for line in lines if line.startswith("#")]
    families = ("requests_total", "up_seconds", "latency_seconds")
    assert described == [(kind, family) for family in families for kind in ("HELP", "TYPE")]
    assert all(line.startswith("requests_total") for line in lines[2:7])
    assert all(line.startswith("up_seconds") for line in lines[9:11])


def test_process_that_says_nothing_or_nonsense_spoils_nothing() -> None:
    expected = merge_metrics([("a", "", LEADER)])
    assert merge_metrics([("b", "", ""), ("a", "", LEADER), ("c", "", "nonsense\n\n# EOF\n{} 3\n")]) == expected
    assert merge_metrics([]) == ""


def test_leader_that_is_scraped_alone_has_a_label_of_the_model_and_none_of_the_process() -> None:
    assert samples(merge_metrics([("", "m", LEADER)]))["up_seconds", frozenset({("model", "m")})] == 1500
