"""What `/metrics` shows (Prometheus). Times in seconds."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from hexrepro.serving.coordinator import Coordinator

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_DECISION = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The gateway's counters, and the coordinator's state as it stands when somebody looks."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.answers = Counter("hexrepro_answers", "answers to clients", ["status"], registry=r)
        self.calls = Counter("hexrepro_calls", "calls by how they ended", ["instance", "end"], registry=r)
        self.failures = Counter(
            "hexrepro_upstream_failures", "attempts that an instance failed", ["instance", "kind"], registry=r
        )
        self.refused = Counter("hexrepro_refused", "calls not taken", ["reason"], registry=r)
        self.decision_s = Histogram(
            "hexrepro_decision_seconds", "time of one decision", registry=r, buckets=_DECISION
        )
        self.queue_s = Histogram(
            "hexrepro_queue_seconds", "wait in the gateway", registry=r, buckets=_SECONDS
        )
        self.first_token_s = Histogram(
            "hexrepro_first_token_seconds",
            "from a call's arrival to its first token",
            registry=r,
            buckets=_SECONDS,
        )
        self.call_s = Histogram(
            "hexrepro_call_seconds", "from a call's arrival to its end", registry=r, buckets=_SECONDS
        )
        r.register(_State(coordinator))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _State:
    def __init__(self, coordinator: Coordinator) -> None:
        self._of = coordinator

    def collect(self) -> Iterator[GaugeMetricFamily]:
        of = self._of
        names = [spec.name for spec in of.cluster.instances]
        columns = {
            "running": "calls handed to the instance",
            "waiting": "calls in the instance's queue",
            "outstanding_s": "estimated execution time of both",
            "kv_tokens": "estimated KV tokens of both",
        }
        for column, text in columns.items():
            family = GaugeMetricFamily(
                f"hexrepro_instance_{column.replace('_s', '_seconds')}", text, labels=["instance"]
            )
            for m, name in enumerate(names):
                family.add_metric([name], float(of.views[column][m]))
            yield family
        up = GaugeMetricFamily("hexrepro_instance_up", "1 if it takes calls", labels=["instance"])
        speed = GaugeMetricFamily(
            "hexrepro_instance_slowdown", "believed time over that of its profile", labels=["instance"]
        )
        for m, name in enumerate(names):
            up.add_metric([name], float(of.is_open[m]))
            speed.add_metric([name], float(of.speed[m]))
        yield up
        yield speed
        yield GaugeMetricFamily("hexrepro_queries_under_way", "queries", value=of.queries_under_way)
        if of.alpha is not None:
            yield GaugeMetricFamily("hexrepro_alpha", "alpha of the dispatch rule", value=of.alpha)
        stages = GaugeMetricFamily(
            "hexrepro_stage_output_tokens", "believed output length of a stage", labels=["stage"]
        )
        for stage in of.stages.list:
            stages.add_metric([stage.name], stage.output_median)
        yield stages
