"""Metrics in the format of Prometheus. All labels are of closed sets: routes, statuses and names of served models.

No label or value is made of anything that a client sent: neither texts, nor keys, nor addresses, nor unknown paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from regard import __version__

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
METHODS = ("GET", "HEAD", "POST", "OPTIONS")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The metrics of one server."""

    def __init__(self, models: Iterable[str], statistics: Callable[[], dict[str, Any]]) -> None:
        """Take the names of the served models, and the function that returns the numbers of the model store."""
        self.registry = registry = CollectorRegistry()
        known: dict[str, Any] = {"registry": registry}
        labels = ("route", "method", "status")
        self.requests = Counter("regard_requests", "Requests that were answered.", labels, **known)
        self.seconds = Histogram(
            "regard_request_seconds", "Time from arrival to the last byte.", ("route",), buckets=SECONDS, **known
        )
        self.first_event = Histogram(
            "regard_first_event_seconds", "Time to the first event of a stream.", buckets=SECONDS, **known
        )
        self.in_flight = Gauge("regard_requests_in_flight", "Requests that are being answered.", **known)
        self.refused = Counter("regard_refused", "Requests that were refused.", ("reason",), **known)
        self.cancelled = Counter("regard_cancelled", "Requests whose client had gone.", **known)
        self.characters = Counter("regard_characters", "Characters of texts that were processed.", **known)
        self.tokens = Counter("regard_tokens", "Tokens of language models.", ("kind",), **known)
        info = Gauge("regard_model_info", "Served models.", ("model", "version"), **known)
        for name in models:
            info.labels(name, __version__).set(1)
        registry.register(StoreCollector(statistics))

    def render(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self.registry)


class StoreCollector:
    """The numbers of the model store, read when metrics are asked for."""

    def __init__(self, statistics: Callable[[], dict[str, Any]]) -> None:
        self.statistics = statistics

    def collect(self) -> Iterable[Metric]:
        """Yield a gauge for each number; numbers of single models have the name of the model as label."""
        found = self.statistics()
        for name, value in found.items():
            if isinstance(value, (int, float)):
                yield GaugeMetricFamily(f"regard_store_{name}", name.replace("_", " "), value=float(value))
        by_model: dict[str, dict[str, float]] = found.get("models", {})
        for name in sorted({name for own in by_model.values() for name in own}):
            family = GaugeMetricFamily(f"regard_model_{name}", name.replace("_", " "), labels=("model",))
            for model, own in by_model.items():
                if isinstance(own.get(name), (int, float)):
                    family.add_metric((model,), float(own[name]))
            yield family
