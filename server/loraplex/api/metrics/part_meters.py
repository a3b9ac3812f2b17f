"""Meters of a server's parts, which tell them what happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from loraplex.lifecycle.agreement_checks import Judgement
from loraplex.lifecycle.durability import PushOutcome
from loraplex.lifecycle.release_guard.rules import MetricName
from loraplex.serving.grammar.checker import CheckOutcome

CHECK_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
DURABLE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
REDIS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
LINE_OUTCOMES = ("completed", "failed", "invalid", "expired")
AGREEMENT_NATS = (1e-6, 1e-5, 1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 10)
SHADOW_OUTCOMES = ("exact", "different", "dropped", "failed", "skipped")


class GrammarMeter:
    """`checked` is the `on_check` of a `GrammarChecker`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        checks = Counter(
            "loraplex_grammar_checks",
            "Schemas and grammars that were built on trial, by outcome; one that was checked before is not counted.",
            ["outcome"],
            registry=registry,
        )
        self._checks = {outcome: checks.labels(outcome) for outcome in get_args(CheckOutcome)}
        self._seconds = Histogram(
            "loraplex_grammar_check_seconds",
            "Time of a check, the wait for its turn included.",
            buckets=CHECK_S,
            registry=registry,
        )

    def checked(self, outcome: CheckOutcome, seconds: float) -> None:
        self._checks[outcome].inc()
        self._seconds.observe(seconds)


class BatchMeter:
    """Counts lines of batches by how they ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        lines = Counter(
            "loraplex_batch_lines",
            "Lines of batches that this server answered, by how they ended; a retried one counts once.",
            ["outcome"],
            registry=registry,
        )
        self._lines = {outcome: lines.labels(outcome) for outcome in LINE_OUTCOMES}

    def ended(self, outcome: str) -> None:
        self._lines[outcome].inc()


class LimiterMeter:
    """The `LimiterWatch` of a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._apart = Gauge(
            "loraplex_limiter_apart",
            "1 while Redis is away and this server decides by itself.",
            registry=registry,
        )
        self._replicas = Gauge(
            "loraplex_limiter_replicas", "Servers that share the limits, as last heard.", registry=registry
        )
        self._replicas.set(1)
        self._seconds = Histogram(
            "loraplex_limiter_redis_seconds",
            "Time of a decision that Redis made.",
            buckets=REDIS_S,
            registry=registry,
        )
        self._losses = Counter(
            "loraplex_limiter_redis_data_losses",
            "Times that Redis had lost its data and was told again what this server knew.",
            registry=registry,
        )
        decisions = Counter(
            "loraplex_limiter_apart_decisions",
            "Decisions without Redis, by result: passed, refused.",
            ["result"],
            registry=registry,
        )
        self._passed, self._refused = decisions.labels("passed"), decisions.labels("refused")

    def redis_answered(self, seconds: float) -> None:
        self._seconds.observe(seconds)

    def decided_apart(self, passed: bool) -> None:
        (self._passed if passed else self._refused).inc()

    def redis_lost_data(self) -> None:
        self._losses.inc()

    def redis_up(self, up: bool, replicas: int) -> None:
        self._apart.set(0 if up else 1)
        self._replicas.set(replicas)


class ReleaseMeter:
    """The `ReleaseWatch` of a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        rollbacks = Counter(
            "loraplex_release_rollbacks",
            "Releases that this server rolled back by itself, by the metric that broke its margin, or unusable.",
            ["reason"],
            registry=registry,
        )
        causes = (*get_args(MetricName), "unusable")
        self._rollbacks = {cause: rollbacks.labels(cause) for cause in causes}
        self._running = Gauge(
            "loraplex_releases_running", "Releases with a guard or a schedule that runs.", registry=registry
        )
        self._leader = Gauge(
            "loraplex_release_leader",
            "1 while this server decides for watched releases; 0 for all where there are none.",
            registry=registry,
        )

    def rolled_back(self, cause: str) -> None:
        self._rollbacks[cause].inc()

    def round_ended(self, *, num_running: int, leads: bool) -> None:
        self._running.set(num_running)
        self._leader.set(leads)


class AgreementMeter:
    """Distribution of what trainers and this server differ by, of all tenants together."""

    def __init__(self, registry: CollectorRegistry) -> None:
        judged = Counter(
            "loraplex_agreement_checks",
            "Pushes that were held to their trainer's log probabilities, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self._judged = {outcome: judged.labels(outcome) for outcome in get_args(Judgement)}
        self._mean = Histogram(
            "loraplex_agreement_mean_nats",
            "Mean absolute difference of a trainer's log probabilities and the server's, of each comparison.",
            buckets=AGREEMENT_NATS,
            registry=registry,
        )

    def compared(self, mean: float) -> None:
        """`mean` is of one comparison, in nats."""
        self._mean.observe(mean)

    def judged(self, outcome: Judgement) -> None:
        """A push was compared, or could not be."""
        self._judged[outcome].inc()


class ShadowMeter:
    """Counts sampled requests of all tenants together: the comparison of a release has those of one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        requests = Counter(
            "loraplex_shadow_requests",
            "Sampled requests that a shadow version was to answer too, by outcome.",
            ["outcome"],
            registry=registry,
        )
        self._requests = {outcome: requests.labels(outcome) for outcome in SHADOW_OUTCOMES}
        self._waiting = Gauge(
            "loraplex_shadow_waiting", "Sampled requests that wait for their turn.", registry=registry
        )
        self._running = Gauge(
            "loraplex_shadow_running", "Sampled requests that are in the engine.", registry=registry
        )

    def ended(self, outcome: str) -> None:
        self._requests[outcome].inc()

    def watch(self, waiting: Callable[[], float], running: Callable[[], float]) -> None:
        self._waiting.set_function(waiting)
        self._running.set_function(running)


class DurabilityMeter:
    """The `DurabilityWatch` of a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        pushes = Counter(
            "loraplex_series_pushes",
            "Tensors pushed to series that were taken, by outcome: early (answered before they were durable), "
            "durable (on the disk by then), known (the series had them).",
            ["outcome"],
            registry=registry,
        )
        self._pushes = {outcome: pushes.labels(outcome) for outcome in get_args(PushOutcome)}
        self._waiting = Gauge(
            "loraplex_versions_not_durable",
            "Versions that serve and wait for the disk.",
            registry=registry,
        )
        self._seconds = Histogram(
            "loraplex_version_durable_seconds",
            "Time from the push of a version that served early until it was durable.",
            buckets=DURABLE_S,
            registry=registry,
        )
        self._failures = Counter(
            "loraplex_version_flush_failures",
            "Times that the disk or the database kept a version from being durable; it is tried again.",
            registry=registry,
        )
        self._lost = Gauge(
            "loraplex_versions_lost",
            "Versions that this server found lost at its start: the machine stopped before they were durable.",
            registry=registry,
        )

    def pushed(self, outcome: PushOutcome) -> None:
        self._pushes[outcome].inc()

    def watch(self, waiting: Callable[[], float]) -> None:
        self._waiting.set_function(waiting)

    def durable(self, seconds: float) -> None:
        self._seconds.observe(seconds)

    def flush_failed(self) -> None:
        self._failures.inc()

    def lost(self, number: int) -> None:
        self._lost.set(number)


class TraceMeter:
    """Each finished span is counted once, by any thread: as `exported`, `failed` where it was sent and not taken, or
    `dropped` where it was never sent, for want of room or time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        spans = Counter(
            "loraplex_trace_spans",
            "Finished spans, by outcome: exported, failed (the collector refused them), dropped (never sent).",
            ["outcome"],
            registry=registry,
        )
        self._exported, self._failed, self._dropped = map(spans.labels, ("exported", "failed", "dropped"))

    def exported(self, number: int) -> None:
        self._exported.inc(number)

    def failed(self, number: int) -> None:
        self._failed.inc(number)

    def dropped(self, number: int) -> None:
        self._dropped.inc(number)
