"""Metrics of a whole graph: each replica's families, labelled and merged into one text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One value of one time series."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A metric with all its samples."""

    name: str
    documentation: str
    kind: str
    samples: tuple[Sample, ...]


def read_families(registry: CollectorRegistry) -> tuple[Family, ...]:
    """What a replica's registry holds now."""
    return tuple(
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            tuple(Sample(s.name, dict(s.labels), float(s.value)) for s in metric.samples),
        )
        for metric in registry.collect()
    )


def merge(own: Iterable[Family], replicas: Mapping[str, Iterable[Family]]) -> bytes:
    """One text of the supervisor's own families and those of all replicas, by replica id.

    Samples of replicas get the labels `node` and `replica`; families of one name become one.
    """
    merged: dict[str, Metric] = {}
    for family in own:
        _add(merged, family, {})
    for id, families in replicas.items():
        for family in families:
            _add(merged, family, {"node": id.partition("/")[0], "replica": id})
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(list(merged.values())))
    return generate_latest(registry)


def _add(merged: dict[str, Metric], family: Family, labels: Mapping[str, str]) -> None:
    metric = merged.setdefault(family.name, Metric(family.name, family.documentation, family.kind))
    for sample in family.samples:
        metric.add_sample(sample.name, {**sample.labels, **labels}, sample.value)


class _Fixed(Collector):
    """Collects families that are already there."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)
