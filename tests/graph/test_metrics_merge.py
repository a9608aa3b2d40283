"""Merging the metrics of several replicas."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.parser import text_string_to_metric_families

from graph.metrics import Family, Sample, merge, read_families


def make_registry(requests: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("headrace_requests", "Requests.", ["kind"], registry=registry).labels("chat").inc(requests)
    Histogram("headrace_step_seconds", "Steps.", buckets=(0.1, 1.0), registry=registry).observe(0.5)
    return registry


def test_no_replica_gives_the_own_metrics_alone() -> None:
    own = [Family("headrace_replicas", "Replicas.", "gauge", (Sample("headrace_replicas", {"node": "a"}, 0.0),))]

    assert 'headrace_replicas{node="a"} 0.0' in merge(own, {}).decode()
    assert merge([], {}) == b""


def test_families_of_one_name_become_one_with_labels() -> None:
    replicas = {id: read_families(make_registry(n)) for id, n in (("decode/0", 3), ("decode/1", 4))}

    families = {family.name: family for family in text_string_to_metric_families(merge([], replicas).decode())}
    requests = {s.labels["replica"]: s for s in families["headrace_requests"].samples if s.name.endswith("_total")}
    assert {id: sample.value for id, sample in requests.items()} == {"decode/0": 3.0, "decode/1": 4.0}
    assert requests["decode/0"].labels == {"kind": "chat", "node": "decode", "replica": "decode/0"}
    buckets = [s for s in families["headrace_step_seconds"].samples if s.name.endswith("_bucket")]
    assert len(buckets) == 2 * 3  # two replicas; 0.1, 1.0, +Inf
