"""Prometheus metrics, in registries of their own.

`vllm:*` keep the names, labels and meanings of vLLM's, so that inference gateways and dashboards work unchanged;
`loraplex_*` are ours. What a client can choose (tenants, adapter names) is a label only up to a fixed number of
different values at a time; the rest is counted under "other" (`label_sets`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.adapters.ref import AdapterRef
from loraplex.api.errors import ANSWERS
from loraplex.api.metrics import part_meters
from loraplex.api.metrics.arm_metrics import ArmMeter
from loraplex.api.metrics.cluster_metrics import cluster_families
from loraplex.api.metrics.collectors import BackgroundCollector, DiskCollector
from loraplex.api.metrics.engine_metrics import EngineSnapshot, Grown, own_families, vllm_families
from loraplex.api.metrics.label_sets import IDLE_S, OTHER, LabelSets, OwnedCounter
from loraplex.api.metrics.residency_metrics import LoadTimes, residency_families
from loraplex.api.metrics.token_histogram import TokenHistogram
from loraplex.control.background import BackgroundTasks
from loraplex.control.types import LIMIT_KINDS, CheckOutcome, LimitOwner, ReachedLimit
from loraplex.control.usage.journal import UsageJournal
from loraplex.control.usage.writer import UsageWriter
from loraplex.engine.types import FinishReason, Timing

E2E_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TTFT_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
PHASE_S = (0.001, 0.005, 0.01, 0.05, *E2E_S)
TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5),
    *(7.5, 10, 20, 40, 80),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
DECISION_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
LimitsOutcome = Literal["allowed", "rate_limit_exceeded", "insufficient_quota", "never_fits", "unavailable"]
LOAD_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
MAX_LABEL_SETS = 1000
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


def adapter_label(adapter: AdapterRef | None) -> str:
    return "base" if adapter is None else f"{adapter.name}@v{adapter.version}"


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _without_created(family: Metric) -> Metric:
    """Series by tenant leave out when each began: half of a large scrape, and rates need it not."""
    if family.type in ("counter", "histogram"):
        family.samples = [
            sample
            for sample in family.samples
            if "tenant" not in sample.labels or not sample.name.endswith("_created")
        ]
    return family


class Metrics:
    """The instruments of one server. `model_name` is the base model's served name; at most `max_label_sets`
    tenants, and as many pairs of tenant and adapter version, have series of their own at a time."""

    def __init__(
        self,
        model_name: str,
        *,
        residency: bool = False,
        max_label_sets: int = MAX_LABEL_SETS,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model_name = model_name
        self._wall_clock = wall_clock
        self._vllm = CollectorRegistry()
        self._own = CollectorRegistry()
        self._grown = Grown()
        self._labels = LabelSets(max_label_sets, idle_s=IDLE_S, clock=clock, on_drop=self._drop_series)
        self._loads_seen: dict[str, dict[str, float]] = {}
        self._load_times = LoadTimes() if residency else None

        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_S)
        self._inter_token = TokenHistogram(
            "vllm:inter_token_latency_seconds", "Between two tokens.", {"model_name": model_name}, TOKEN_S
        )
        self._vllm.register(self._inter_token)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", E2E_S)
        self._queue = self._histogram("request_queue_time_seconds", "Time spent waiting to be run.", PHASE_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "First step to first token.", PHASE_S)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token.", PHASE_S)
        self._inference = self._histogram(
            "request_inference_time_seconds", "First step to last token.", PHASE_S
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of a token after the first.", TOKEN_S
        )
        self._preemptions = self._histogram(
            "request_num_preemptions", "Preemptions of a request.", PREEMPTIONS
        )
        self._computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", TOKENS
        )
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens of a request.", TOKENS)
        self._n = self._histogram("request_params_n", "n of a request.", CHOICES)
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Output tokens of the longest choice.", TOKENS
        )
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._generation = self._histogram("request_generation_tokens", "Output tokens of a request.", TOKENS)
        self._make_totals()
        self._make_answers()
        self._make_limits_and_adapters()
        self._make_state()

    def _make_totals(self) -> None:
        """Totals of the answers that ended, by vLLM's names."""
        names, model_name = ["model_name"], self.model_name
        self._prompt_tokens = Counter(
            "vllm:prompt_tokens", "Prompt tokens processed.", names, registry=self._vllm
        ).labels(model_name)
        self._cached_tokens = Counter(
            "vllm:prompt_tokens_cached", "Prompt tokens that were cached.", names, registry=self._vllm
        ).labels(model_name)
        self._generation_tokens = Counter(
            "vllm:generation_tokens", "Output tokens generated.", names, registry=self._vllm
        ).labels(model_name)
        success = Counter(
            "vllm:request_success",
            "Requests that ended, by how.",
            ["model_name", "finished_reason"],
            registry=self._vllm,
        )
        self._success = {reason: success.labels(model_name, reason) for reason in FINISH_REASONS}

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"loraplex_{name}", text, labels, registry=self._own)

    def _make_answers(self) -> None:
        """Answers and tokens by tenant, and changes by the admin API."""
        counter = self._counter
        self._requests = OwnedCounter(
            counter("requests", "Requests answered, by HTTP status.", "tenant", "adapter", "status")
        )
        self._tenant_requests = OwnedCounter(
            counter("tenant_requests", "Requests answered, of all adapters.", "tenant", "status")
        )
        self._tokens = OwnedCounter(
            counter("tokens", "Tokens by kind: prompt, cached, completion.", "tenant", "kind")
        )
        self._shared = OwnedCounter(
            counter(
                "alora_shared_tokens",
                "Prompt tokens of activated LoRAs whose KV was the base model's in the prefix cache.",
                "tenant",
                "adapter",
            )
        )
        self._refusals = OwnedCounter(
            counter("limiter_refusals", "Requests refused by a limit.", "tenant", "code")
        )
        self._responses = counter("http_responses", "Answers of the data port, by HTTP status.", "status")
        for status in sorted({200} | {status for status, _ in ANSWERS.values()}):
            self._responses.labels(str(status))
        self._changes = counter("admin_changes", "Changes by the admin API, by action.", "action")
        self._version_checks = counter("version_checks", "Checks of new versions' numbers.", "outcome")
        for outcome in get_args(CheckOutcome):
            self._version_checks.labels(outcome)

    def _make_limits_and_adapters(self) -> None:
        """Decisions over limits, answers that ended early, and the times of adapters."""
        counter = self._counter
        self._reached = counter(
            "limiter_limits_reached", "Requests refused, by the limit they are told.", "owner", "limit"
        )
        for owner, kind in product(get_args(LimitOwner), LIMIT_KINDS):
            self._reached.labels(owner, kind)
        self._decisions = counter("limiter_decisions", "Decisions over limits, by outcome.", "outcome")
        self._decision_s = Histogram(
            "loraplex_limiter_decision_seconds",
            "Time until limits were decided.",
            buckets=DECISION_S,
            registry=self._own,
        )
        self._cut = counter("streams_cut", "Answers that ended early: gone, stalled.", "reason")
        for reason in ("gone", "stalled"):
            self._cut.labels(reason)
        self._load = Histogram(
            "loraplex_adapter_load_seconds",
            "Time to load an adapter version, by stage; the latest load of each version at a scrape.",
            ["stage"],
            buckets=LOAD_S,
            registry=self._own,
        )
        self._adapter_wait = Histogram(
            "loraplex_adapter_wait_seconds",
            "What sequences waited for their adapter; only those that did.",
            buckets=LOAD_S,
            registry=self._own,
        )

    def _make_state(self) -> None:
        """The state of the server: its requests, its database, the usage on its way there."""
        self.in_flight = Gauge(
            "loraplex_http_requests_in_flight", "HTTP requests being answered.", registry=self._own
        )
        self.database_up = Gauge(
            "loraplex_database_up", "1 while the database can be reached.", registry=self._own
        )
        self.database_up.set(1)
        self.database_outage = Gauge(
            "loraplex_database_outage_seconds",
            "Time since the database was lost; 0 while it is there.",
            registry=self._own,
        )
        self.limiter = part_meters.LimiterMeter(self._own)
        self.traces = part_meters.TraceMeter(self._own)
        self.grammars = part_meters.GrammarMeter(self._own)
        self.arms = ArmMeter(self._own)
        self.releases = part_meters.ReleaseMeter(self._own)
        self.shadows = part_meters.ShadowMeter(self._own)
        self.agreement = part_meters.AgreementMeter(self._own)
        self.batches = part_meters.BatchMeter(self._own)
        self.durability = part_meters.DurabilityMeter(self._own)
        self.usage_written = Counter(
            "loraplex_usage_rows_written", "Rows that the usage ledger has.", registry=self._own
        )
        self.usage_waiting = Gauge(
            "loraplex_usage_rows_waiting", "Rows that the database has not been told yet.", registry=self._own
        )
        self.usage_lag = Gauge(
            "loraplex_usage_lag_seconds", "Time that the oldest waiting row has waited.", registry=self._own
        )
        self.usage_journal = Gauge(
            "loraplex_usage_journal_bytes", "Disk that the usage journal takes.", registry=self._own
        )
        self.usage_full = Gauge(
            "loraplex_usage_journal_full",
            "1 while no request is taken, because its usage could not be recorded.",
            registry=self._own,
        )
        self.draining = Gauge("loraplex_draining", "1 while the server is shutting down.", registry=self._own)

    def watch_usage(self, journal: UsageJournal, writer: UsageWriter) -> None:
        """Show the usage that is on its way into the database."""
        writer.on_written = self.usage_written.inc
        self.usage_waiting.set_function(lambda: writer.num_waiting)
        self.usage_lag.set_function(lambda: writer.lag_s)
        self.usage_journal.set_function(lambda: journal.num_bytes)
        self.usage_full.set_function(lambda: float(journal.full))

    def watch_background(self, tasks: BackgroundTasks) -> None:
        """Show them from the next scrape on."""
        self._own.register(BackgroundCollector(tasks))

    def watch_disks(self, directories: Mapping[str, Path]) -> None:
        """Show what is left for them from the next scrape on. Directories by what they hold."""
        self._own.register(DiskCollector(directories))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self._vllm)
        return histogram.labels(self.model_name)

    # What the data plane tells.

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` came together `seconds` after the ones before: one observation of the time of each."""
        self._inter_token.observe(seconds / num_tokens)

    def sequence_ended(
        self,
        tenant_id: str,
        reason: FinishReason,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int,
        max_tokens: int,
        seconds: float,
        timing: Timing | None,
    ) -> None:
        """One engine request ended; each is counted once, whatever ended it."""
        self._success[reason].inc()
        self._e2e.observe(seconds)
        if timing is not None:
            self._observe_timing(timing, completion_tokens)
            if timing.adapter_s is not None:
                self._adapter_wait.observe(timing.adapter_s)
        if max_tokens:
            self._max_tokens.observe(max_tokens)
        self._computed.observe(prompt_tokens - cached_tokens)
        self._cached_tokens.inc(cached_tokens)
        self._prompt.observe(prompt_tokens)
        self._generation.observe(completion_tokens)
        self._prompt_tokens.inc(prompt_tokens)
        self._generation_tokens.inc(completion_tokens)
        tenant = self._labels.tenant(tenant_id)
        self._tokens.inc((tenant,), "prompt", amount=prompt_tokens)
        self._tokens.inc((tenant,), "cached", amount=cached_tokens)
        self._tokens.inc((tenant,), "completion", amount=completion_tokens)

    def _observe_timing(self, timing: Timing, completion_tokens: int) -> None:
        """The phases of a sequence that has a token; without one they have no end."""
        self._queue.observe(timing.queue_s)
        self._preemptions.observe(timing.num_preemptions)
        first, last = timing.first_token_s, timing.last_token_s
        if first is None or last is None:
            return
        self._prefill.observe(first - timing.queue_s)
        self._decode.observe(last - first)
        self._inference.observe(last - timing.queue_s)
        self._per_token.observe((last - first) / max(1, completion_tokens - 1))

    def shared_with_base(self, tenant_id: str, adapter: AdapterRef, num_tokens: int) -> None:
        """An activated LoRA's sequence found `num_tokens` of its prompt in the prefix cache as the base model's."""
        self._shared.inc(self._labels.pair(tenant_id, adapter_label(adapter)), amount=num_tokens)

    def prompt_ended(self, *, n: int, longest: int) -> None:
        """All `n` sequences of a prompt ended; the longest has this many output tokens."""
        self._n.observe(n)
        self._longest.observe(longest)

    def responded(self, status: int) -> None:
        """An answer of the data port has begun, to any caller and route."""
        self._responses.labels(str(status)).inc()

    def expect_changes(self, actions: Iterable[str]) -> None:
        """Begin their counters at 0: an increase from nothing to 1 is none for Prometheus."""
        for action in actions:
            self._changes.labels(action)

    def admin_changed(self, action: str) -> None:
        """The admin API has changed something; `action` as the audit log calls it."""
        self._changes.labels(action).inc()

    def version_checked(self, outcome: CheckOutcome) -> None:
        """An attempt to check the numbers of a new version has ended."""
        self._version_checks.labels(outcome).inc()

    def request_answered(self, tenant_id: str, adapter: AdapterRef | None, status: int) -> None:
        tenant, version = self._labels.pair(tenant_id, adapter_label(adapter))
        self._tenant_requests.inc((tenant,), str(status))
        self._requests.inc((tenant, version), str(status))

    def refused_by_limit(self, tenant_id: str, code: str) -> None:
        self._refusals.inc((self._labels.tenant(tenant_id),), code)

    def _drop_series(self, tenant: str, version: str | None) -> None:
        if version is not None:
            self._requests.remove((tenant, version))
            self._shared.remove((tenant, version))
            return
        self._requests.remove((tenant, OTHER))
        self._shared.remove((tenant, OTHER))
        for counter in (self._tenant_requests, self._tokens, self._refusals):
            counter.remove((tenant,))

    def limits_decided(
        self, outcome: LimitsOutcome, seconds: float, reached: ReachedLimit | None = None
    ) -> None:
        """`reached` is the limit that a refused request was told."""
        self._decisions.labels(outcome).inc()
        self._decision_s.observe(seconds)
        if reached is not None:
            self._reached.labels(*reached).inc()

    def stream_cut(self, reason: str) -> None:
        self._cut.labels(reason).inc()

    # A scrape.

    def render(self, snapshot: EngineSnapshot, *, tenant_data: bool = True) -> bytes:
        """The text format 0.0.4. Without `tenant_data` only the `vllm:*` metrics, with no adapter's name."""
        return self.text(self.engine_families(snapshot, tenant_data=tenant_data), tenant_data=tenant_data)

    def engine_families(self, snapshot: EngineSnapshot, *, tenant_data: bool = True) -> list[Metric]:
        """The engine's share of a scrape, for `text`. To be called by the thread that observes: tenants get labels."""
        now = self._wall_clock()
        families = list(vllm_families(snapshot, self.model_name, self._grown, now, adapter_names=tenant_data))
        if self._load_times is not None:
            families += residency_families(
                snapshot.cache, snapshot.stats, self.model_name, adapter_names=tenant_data
            )
            self._load_times.observe(snapshot.cache)
            families.append(self._load_times.family(self.model_name))
        if tenant_data:
            self._observe_loads(snapshot.cache)
            families += own_families(snapshot, self._labels, self._grown)
            families += cluster_families(snapshot.cluster)
        return families

    def text(self, engine_families: Iterable[Metric], *, tenant_data: bool = True) -> bytes:
        """The text format 0.0.4. May run in any thread: with all labels in use it takes a good part of a second."""
        families = [*self._vllm.collect(), *engine_families]
        if tenant_data:
            families += map(_without_created, self._own.collect())
        return generate_latest(_Families(families))

    def _observe_loads(self, cache: Iterable[CacheEntry]) -> None:
        seen = {entry.ref.digest: entry.load_seconds for entry in cache if entry.load_seconds}
        for digest, stages in seen.items():
            if stages != self._loads_seen.get(digest):
                for stage, seconds in stages.items():
                    self._load.labels(stage).observe(seconds)
        self._loads_seen = seen
