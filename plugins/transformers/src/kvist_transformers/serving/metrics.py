"""What ``/metrics`` shows, in Prometheus' text format: the cache manager's stats, the engine's, and the server's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import attrs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvist.stats import ManagerStats
from kvist_transformers.engine import Engine
from kvist_transformers.serving.worker import Routes, Update
from kvist_transformers.stats import EngineStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
#: Fields of ManagerStats that only grow, and what they count.
_COUNTERS = {
    "requests": "Sequences that have begun",
    "prompt_tokens": "Prompt tokens of those sequences",
    "reused_tokens": "Prompt tokens that came from the cache",
    "received_tokens": "Prompt tokens that came from another process",
    "computed_tokens": "Rows that completed steps have written",
    "resumes": "Times that a suspended sequence went on",
    "resumed_tokens": "Tokens that resumed sequences had still",
    "forked_tokens": "Tokens that forks began with",
    "steps": "Completed steps",
}
_GROUP_GAUGES = {
    "capacity": "Pages if the group had the whole cache",
    "free": "Pages that can be taken at once",
    "cached": "Pages that are published and held by nobody",
    "held": "Pages that are leased",
    "held_peak": "Most pages that were leased at a time",
}
_GROUP_COUNTERS = {
    "evicted": "Pages evicted",
    "moved": "Pages copied to empty a slab",
    "lost_tokens": "Known prompt tokens that were computed again because the group had no restore point behind them",
}
_TIMES = ("plan", "model", "sample", "complete")


@attrs.frozen
class Reading:
    """What the engine's thread is asked for, all at one moment."""

    manager: ManagerStats
    engine: EngineStats
    routes: Routes | None

    @classmethod
    def of(cls, engine: Engine, routes: Routes | None) -> Reading:
        """In the engine's thread."""
        return cls(engine.manager.stats(), attrs.evolve(engine.stats), None if routes is None else attrs.evolve(routes))


class _Collector:
    """Gives one reading to prometheus_client."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def collect(self) -> Iterator[Metric]:
        stats, engine = self._reading.manager, self._reading.engine
        for name, about in _COUNTERS.items():
            yield CounterMetricFamily(f"kvist_cache_{name}", f"{about}.", value=getattr(stats, name))
        yield GaugeMetricFamily("kvist_cache_open_sequences", "Sequences that are open.", value=stats.open_sequences)
        yield GaugeMetricFamily("kvist_cache_extents", "Nodes of the prefix tree.", value=stats.extents)
        for name, about in _GROUP_GAUGES.items():
            gauge = GaugeMetricFamily(f"kvist_cache_pages_{name}", f"{about}.", labels=("group",))
            for group in stats.groups:
                gauge.add_metric((group.name,), getattr(group, name))
            yield gauge
        for name, about in _GROUP_COUNTERS.items():
            counter = CounterMetricFamily(f"kvist_cache_{name}", f"{about}.", labels=("group",))
            for group in stats.groups:
                counter.add_metric((group.name,), getattr(group, name))
            yield counter
        yield from _tiers(stats)
        yield CounterMetricFamily("kvist_engine_generated_tokens", "Tokens generated.", value=engine.generated_tokens)
        yield CounterMetricFamily("kvist_engine_pauses", "Times that a request lost its pages.", value=engine.pauses)
        spent = CounterMetricFamily("kvist_engine_seconds", "Where the steps' time went.", labels=("part",))
        for part in _TIMES:
            spent.add_metric((part,), getattr(engine, f"{part}_ns") / 1e9)
        yield spent
        routes = self._reading.routes
        if routes is not None:
            counter = CounterMetricFamily("kvist_routes", "Requests by where the prompt went.", labels=("route",))
            for route in ("near", "far", "lost"):
                counter.add_metric((route,), getattr(routes, route))
            yield counter
            yield GaugeMetricFamily("kvist_prefill_open", "Whether the prefill process is there.", value=routes.open)


def _tiers(stats: ManagerStats) -> Iterable[Metric]:
    used = GaugeMetricFamily("kvist_tier_used_bytes", "Bytes in use in a tier below the device.", labels=("tier",))
    reused = CounterMetricFamily("kvist_tier_reused_tokens", "Reused tokens that came from a tier.", labels=("tier",))
    failed = CounterMetricFamily("kvist_tier_failed_blocks", "Copies of blocks that did not arrive.", labels=("tier",))
    for tier in stats.tiers:
        used.add_metric((tier.name,), tier.used_bytes)
        reused.add_metric((tier.name,), tier.reused_tokens)
        failed.add_metric((tier.name,), tier.failed_blocks)
    return (used, reused, failed) if stats.tiers else ()


class ServerMetrics:
    """What the event loop counts and times itself. Histograms are in seconds, of requests that have a result."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._answers = Counter(
            "kvist_http_answers", "Answers by path and HTTP status.", ("path", "status"), registry=registry
        )
        self._ended = Counter("kvist_requests", "Requests by why they ended.", ("reason",), registry=registry)
        self._in_flight = Gauge("kvist_requests_in_flight", "Requests that wait or run.", registry=registry)
        histograms = {
            "queue": "From arrival to admission",
            "first_token": "From arrival to the first token",
            "total": "From arrival to the end",
            "token_gap": "Mean time between tokens of a request",
        }
        self._times = {
            name: Histogram(f"kvist_request_{name}_seconds", f"{about}.", buckets=_SECONDS, registry=registry)
            for name, about in histograms.items()
        }
        self._prompt = Counter("kvist_request_prompt_tokens", "Prompt tokens of ended requests.", registry=registry)
        self._cached = Counter("kvist_request_cached_tokens", "Of them, those reused.", registry=registry)
        self._output = Counter("kvist_request_output_tokens", "Tokens that ended requests got.", registry=registry)

    def answered(self, path: str, status: int) -> None:
        """An HTTP request is answered, or its client has gone: 499."""
        self._answers.labels(path, str(status)).inc()

    def ended(self, update: Update) -> None:
        """The last update of a request."""
        completion, times = update.completion, update.times
        if completion is None:
            self._ended.labels("error").inc()
            return
        self._ended.labels(completion.finish_reason).inc()
        self._prompt.inc(completion.prompt_tokens)
        self._cached.inc(completion.reused_tokens)
        self._output.inc(len(completion.tokens))
        if times is None:
            return  # it never came to this engine
        spans = {
            "queue": times.admitted_s - times.arrival_s,
            "first_token": times.first_token_s - times.arrival_s,
            "total": times.ended_s - times.arrival_s,
        }
        if len(completion.tokens) > 1:
            spans["token_gap"] = (times.ended_s - times.first_token_s) / (len(completion.tokens) - 1)
        for name, span in spans.items():
            if not math.isnan(span):
                self._times[name].observe(span)

    def text(self, reading: Reading | None, in_flight: int) -> bytes:
        """The page. reading: ``None`` when the engine is broken."""
        self._in_flight.set(in_flight)
        page = generate_latest(self._registry)
        if reading is None:
            return page
        passing = CollectorRegistry()
        passing.register(_Collector(reading))
        return page + generate_latest(passing)
