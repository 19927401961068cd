"""Metrics of several processes in one exposition: a label says which process a sample is from."""

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from multiworld_serving.server.frontends.merge_metrics import merge_metrics
from multiworld_serving.server.observability.metrics import Metrics

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
    merged = merge_metrics([("leader-0", LEADER), ("frontend-0", FRONTEND)])
    found = samples(merged)
    assert found["requests_total", frozenset({("outcome", "ok"), ("process", "leader-0")})] == 3
    assert found["requests_total", frozenset({("outcome", "ok"), ("process", "frontend-0")})] == 5
    assert found["requests_total", frozenset({("outcome", 'say "}\\ no'), ("process", "leader-0")})] == 1
    assert found["up_seconds", frozenset({("process", "leader-0")})] == 1500
    assert found["latency_seconds_bucket", frozenset({("le", "+Inf"), ("process", "frontend-0")})] == 2
    assert len(found) == 8


def test_exemplars_are_kept_in_openmetrics_only() -> None:
    metrics = Metrics()
    for code, duration_s, trace_id in ((200, 0.3, 0xABC), (200, 0.7, None), (500, 9.0, 0xDEF)):
        metrics.request_finished(
            model='odd "} # {',
            version="v",
            protocol="predict",
            code=code,
            reason="ok",
            duration_s=duration_s,
            trace_id=trace_id,
        )
    parts = [("frontend-0", metrics.part()), ("leader-0", Metrics().part())]
    exemplars = {
        (sample.labels["model"], sample.labels["process"], sample.labels["code"]): (
            sample.exemplar.labels["trace_id"],
            sample.exemplar.value,
        )
        for family in openmetrics.text_string_to_metric_families(  # type: ignore[no-untyped-call]
            merge_metrics(parts, openmetrics=True)
        )
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert exemplars == {
        ('odd "} # {', "frontend-0", "200"): (f"{0xABC:032x}", 0.3),
        ('odd "} # {', "frontend-0", "500"): (f"{0xDEF:032x}", 9.0),
    }
    plain = merge_metrics(parts)
    assert "trace_id" not in plain
    without = [("frontend-0", metrics.exposition()[0].decode()), ("leader-0", Metrics().exposition()[0].decode())]
    assert samples(plain).keys() == samples(merge_metrics(without)).keys()
    assert b"trace_id" not in metrics.exposition()[0]
    assert b"trace_id" in metrics.exposition("application/openmetrics-text; version=1.0.0")[0]


def test_families_are_described_once_and_their_samples_are_together() -> None:
    lines = merge_metrics([("a", LEADER), ("b", FRONTEND), ("c", LEADER)]).splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        "# HELP requests_total Requests.",
        "# TYPE requests_total counter",
        "# HELP up_seconds Uptime.",
        "# TYPE up_seconds gauge",
        "# HELP latency_seconds Latency.",
        "# TYPE latency_seconds histogram",
    ]
    assert all(line.startswith("requests_total") for line in lines[2:7])
    assert all(line.startswith("up_seconds") for line in lines[9:11])


def test_name_of_a_process_is_escaped() -> None:
    [(name, labels)] = samples(merge_metrics([('a "\\b"', "# HELP up Up.\n# TYPE up gauge\nup 1\n")]))
    assert (name, dict(labels)) == ("up", {"process": 'a "\\b"'})


def test_process_that_says_nothing_or_nonsense_spoils_nothing() -> None:
    expected = merge_metrics([("a", LEADER)])
    assert merge_metrics([("b", ""), ("a", LEADER), ("c", "nonsense\n\n# EOF\n{} 3\n")]) == expected
    assert merge_metrics([]) == ""


def test_metrics_of_real_processes_stay_complete() -> None:
    first, second = Metrics(), Metrics()
    for count, metrics in enumerate((first, second), 1):
        metrics.frontends(count)
        metrics.leaders(1, count)
    texts = [(name, metrics.exposition()[0].decode()) for name, metrics in (("one", first), ("two", second))]
    merged = samples(merge_metrics(texts))
    for name, text in texts:
        for (sample, labels), value in samples(text).items():
            found = merged[sample, labels | {("process", name)}]
            assert found == value or (found != found and value != value), sample
    assert len(merged) == sum(len(samples(text)) for _, text in texts)


def test_openmetrics_has_the_same_samples() -> None:
    texts = [("a", LEADER), ("b", FRONTEND), ("c", Metrics().exposition()[0].decode())]
    texts.append(
        ("d", '# HELP odd_total Say "no".\n# TYPE odd_total counter\nodd_total 1\n# HELP x X.\n# TYPE x untyped\nx 1\n')
    )
    text = merge_metrics(texts, openmetrics=True)
    families = list(openmetrics.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
    found = {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}
    assert found == samples(merge_metrics(texts))
    kinds = {family.name: (family.type, family.documentation) for family in families}
    assert kinds["requests"] == ("counter", "Requests.")
    assert kinds["odd"] == ("counter", 'Say "no".')
    assert kinds["x"] == ("unknown", "X.")
    assert text.endswith("\n# EOF\n")
    assert merge_metrics([], openmetrics=True) == "# EOF\n"
