"""Numbers in the documents that repeat a constant of the code: each phrase here holds the constant's present value."""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import signature
from typing import Any

import pytest

from loraplex.adapters.admission.config import token_indices
from loraplex.adapters.cache import failures
from loraplex.adapters.device import layout
from loraplex.adapters.store.files import CHAT_FILE_BYTES, MAX_CONFIG_BYTES
from loraplex.admin import change_rate_limit
from loraplex.admin.framework import strict_request
from loraplex.admin.routes.usage import DEFAULT_PERIOD
from loraplex.admin.services import ReportGate, UploadGate
from loraplex.admin.uploads import receive
from loraplex.api import deps, millisecond_headers
from loraplex.api.embeddings.schemas import MAX_ANSWER_BYTES, most_inputs
from loraplex.api.generation import decision, planning
from loraplex.api.metrics import Scraper, api_metrics, engine_metrics, label_sets
from loraplex.api.openai import messages, sampling, schemas
from loraplex.app.cluster import policy
from loraplex.app.ports import connections
from loraplex.app.settings import Settings
from loraplex.control import release_types, rules
from loraplex.control.audit import log as audit_log
from loraplex.control.catalog import release_changes, release_runs, releases, resolver
from loraplex.control.catalog.resolver import Resolver
from loraplex.control.db import database, outage, postgres, postgres_engine, read_through, sqlite
from loraplex.control.limits import budget_store, budgets, limiter, redis_limiter, redis_session
from loraplex.control.tenancy import key_use, keys
from loraplex.control.tenancy.key_cache import KeyCache
from loraplex.control.usage import journal, roll_up
from loraplex.engine import build, device_parts, sizing
from loraplex.engine.config import Charges, SchedulerConfig
from loraplex.engine.execution import device_memory, kv_cache
from loraplex.engine.grammar import dictated
from loraplex.engine.kv import sequence_blocks
from loraplex.engine.scheduling import step_budget
from loraplex.engine.scheduling.drafting import MAX_DRAFT
from loraplex.http import body, context
from loraplex.kernels.attention import BLOCK_SIZE
from loraplex.kernels.numba_runtime import cache as numba_cache
from loraplex.lifecycle import tenant_terms
from loraplex.lifecycle.release_guard import course, repeats, window
from loraplex.lifecycle.releases import deliveries, rounds, webhook
from loraplex.serving.dialling import hello, members, tcp
from loraplex.serving.dialling.relay import DialPolicy
from loraplex.serving.engines import failover
from loraplex.serving.grammar import builders, checker, schema_rules
from loraplex.serving.supervision import supervisor, watchdog
from loraplex.serving.supervision.engine_supervisor import Supervision
from loraplex.serving.templates import renderer
from support import markdown

KIB, MIB, GIB, DAY = 1 << 10, 1 << 20, 1 << 30, 86400


def default(made: Any, name: str) -> Any:
    """What a parameter or a dataclass's field is where nothing is given."""
    for field in fields(made) if hasattr(made, "__dataclass_fields__") else ():
        if field.name == name:
            return field.default
    return signature(made).parameters[name].default


def setting(name: str) -> Any:
    return Settings.model_fields[name].default


def bound(name: str, kind: str, model: type[Any] = schemas.ChatRequest) -> Any:
    """A bound on a request's field: `minimum`, `maxLength`, …"""

    def found(schema: Any) -> Any:
        if isinstance(schema, dict):
            if kind in schema:
                return schema[kind]
            return next((value for part in schema.values() if (value := found(part)) is not None), None)
        if isinstance(schema, list):
            return next((value for part in schema if (value := found(part)) is not None), None)
        return None

    value = found(model.model_json_schema()["properties"][name])
    assert value is not None, (name, kind)
    return value


def lua(name: str) -> float:
    """A constant of the script that Redis runs, in seconds."""
    text = (markdown.ROOT / "server/loraplex/control/limits/redis_limiter.lua").read_text("utf-8")
    found = re.search(rf"^local {name} = ([\d.e]+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1]) / 1e6


WATCH = watchdog.WatchdogPolicy()
RESTART = supervisor.RestartPolicy()
BOUNDS = connections.Bounds()
CHARGES = Charges()
TTL_S = default(KeyCache, "ttl_s")
START_MINUTES = Supervision().start_timeout_s / 60
POOL = postgres_engine.POOL_SIZE + postgres_engine.POOL_OVERFLOW
SLICE_S = default(budget_store.BudgetStore, "slice_s")
STALENESS = setting("database_staleness")
COMPLETION = schemas.CompletionRequest
GRAMMARS = checker.GrammarLimits()
TEMPLATES = renderer.TemplateLimits()

CLAIMS: list[tuple[str, str, tuple[Any, ...]]] = [
    ("admin.md", "A body is at most {:g} KiB of JSON", (strict_request.MAX_JSON_BYTES / KIB,)),
    ("admin.md", "the JSON body exceeds {:g} KiB", (strict_request.MAX_JSON_BYTES / KIB,)),
    ("admin.md", "`limit` (1 to {}, default {})", (rules.MAX_PAGE, rules.DEFAULT_PAGE)),
    ("admin.md", "`weight` ({:g} to {:g}, default 1)", (rules.MIN_WEIGHT, rules.MAX_WEIGHT)),
    ("admin.md", "`grace_seconds` more (0 to {:g} days)", (keys.MAX_GRACE_S / DAY,)),
    ("admin.md", "At most {} uploads are on their way", (default(UploadGate, "max_uploads"),)),
    ("admin.md", "`targets` has 1 to {} ready versions", (releases.MAX_TARGETS,)),
    ("admin.md", "a weight (0 to {:,})", (release_types.MAX_RELEASE_WEIGHT,)),
    ("admin.md", "The last {} of a name are kept", (release_changes.MAX_REVISIONS,)),
    ("admin.md", "the config beyond {:g} MiB", (MAX_CONFIG_BYTES / MIB,)),
    ("admin.md", "nothing of the body came for {:g} s", (body.SILENCE_S,)),
    ("admin.md", "slower than {:,} bytes a second", (body.MIN_BYTES_PER_S,)),
    ("admin.md", "more than {} things in a minute on this server", (change_rate_limit.MAX_CHANGES,)),
    ("adapters.md", "The last {} of a name are kept", (release_changes.MAX_REVISIONS,)),
    ("releases.md", "another one leads within {:g} seconds", (rounds.LEASE_S,)),
    ("releases.md", "or every {:g} s while no request", (rounds.IDLE_LOOK_S,)),
    ("releases.md", "A round looks at {} releases of one tenant", (rounds.MAX_LOOKS,)),
    ("releases.md", "A window counts {:,} units", (window.MAX_KEYS,)),
    ("releases.md", "At most {} points are kept", (course.MAX_POINTS,)),
    ("releases.md", "once {} users gave five requests", (repeats.MAX_USERS,)),
    ("releases.md", "Any answer with 2xx within {:g} s takes the event", (webhook.TIMEOUT_S,)),
    ("releases.md", "sent again, after {:g} s at first", (deliveries.FIRST_PAUSE_S,)),
    ("releases.md", "up to {:g} s, {:g} times in all", (deliveries.LONGEST_PAUSE_S, deliveries.MAX_TRIES)),
    ("releases.md", "Of each tenant up to {} events wait", (deliveries.MAX_WAITING,)),
    ("admin.md", "beyond the {} that a tenant has running or paused", (release_runs.MAX_RUNS,)),
    ("peft-support.md", "rows, up to {:,} of each module", (token_indices.MAX_TOKEN_ROWS,)),
    ("adapters.md", "`support@sha256:<{} or more hex digits>`", (resolver.MIN_DIGEST_CHARS,)),
    ("api.md", "by at least {} hex digits", (resolver.MIN_DIGEST_CHARS,)),
    ("api.md", "`model` | 1 to {} characters", (bound("model", "maxLength"),)),
    ("api.md", "`messages` | 1 to {} messages", (messages.MAX_MESSAGES,)),
    ("api.md", "a list of up to {} of either kind", (schemas.MAX_PROMPTS,)),
    ("api.md", "`temperature` | 0 to {:g}", (bound("temperature", "maximum"),)),
    ("api.md", "so is anything below {}", (sampling.GREEDY_BELOW,)),
    ("api.md", "`top_k` | {} or 0 (off)", (bound("top_k", "minimum"),)),
    ("api.md", "`min_p` | 0 to {:g}", (bound("min_p", "maximum"),)),
    (
        "api.md",
        "`repetition_penalty` | {} to {:g}",
        (bound("repetition_penalty", "minimum"), bound("repetition_penalty", "maximum")),
    ),
    (
        "api.md",
        "`presence_penalty` | {:g} to {:g}",
        (bound("presence_penalty", "minimum"), bound("presence_penalty", "maximum")),
    ),
    ("api.md", "up to {} token ids with -100 to 100", (sampling.MAX_LOGIT_BIAS,)),
    ("api.md", "`n` | 1 to {} ", (schemas.MAX_CHOICES,)),
    ("api.md", "(1 to {:,}; anything else is a 400", (millisecond_headers.MAX_MS,)),
    ("api.md", "(0 to {:,}; anything else is a 400", (millisecond_headers.MAX_MS,)),
    ("api.md", "0 to {} (completions)", (schemas.MAX_COMPLETION_LOGPROBS,)),
    ("api.md", "`top_logprobs` | 0 to {} ", (bound("top_logprobs", "maximum"),)),
    (
        "api.md",
        "a string, or up to {} of up to {} characters",
        (schemas.MAX_STOP_STRINGS, schemas.MAX_STOP_LENGTH),
    ),
    ("api.md", "`stop_token_ids` | up to {} ", (sampling.MAX_STOP_TOKEN_IDS,)),
    (
        "api.md",
        "`priority` | {} to {},",
        (bound("priority", "minimum"), bound("priority", "maximum")),
    ),
    ("api.md", "`user` | up to {} characters", (bound("user", "maxLength"),)),
    (
        "api.md",
        "`metadata` | up to {} pairs of strings of up to {} characters",
        (schemas.MAX_METADATA, bound("metadata", "maxLength")),
    ),
    ("api.md", "`service_tier` | up to {} characters", (bound("service_tier", "maxLength"),)),
    ("api.md", "`prompt_cache_key` | up to {} characters", (bound("prompt_cache_key", "maxLength"),)),
    ("api.md", "`safety_identifier` | up to {} characters", (bound("safety_identifier", "maxLength"),)),
    ("api.md", "cut to {} safe characters", (context.MAX_LABEL,)),
    ("api.md", "An answer holds at most {:,} of them", (planning.MAX_LOGPROBS,)),
    (
        "api.md",
        "a head of more than {:g} KiB or {} fields",
        (BOUNDS.head_bytes / KIB, BOUNDS.headers),
    ),
    ("processes.md", "tokenizers, {} ", (default(deps.ApiServices, "tokenizer_threads"),)),
    (
        "processes.md",
        "database, {}, and look-ups, {} ",
        (database.MAX_THREADS, database.MAX_LOOKUP_THREADS),
    ),
    ("processes.md", "reports, {} ", (default(ReportGate, "max_running"),)),
    (
        "processes.md",
        "uploads, {}, and validation, {} ",
        (default(UploadGate, "max_uploads"), default(UploadGate, "max_validations")),
    ),
    ("processes.md", "`adapter-load`, {} ", (build.LOADER_THREADS,)),
    ("speculation.md", "what followed there, {} tokens at most", (MAX_DRAFT,)),
    (
        "speculation.md",
        "{:g} MiB of a tenant, {:g} MiB in all",
        (build.TENANT_HISTORY_BYTES / MIB, build.HISTORY_BYTES / MIB),
    ),
    ("processes.md", "caches, at most {:g} s old", (TTL_S,)),
    ("request-path.md", "other processes see it after {:g} s at most", (default(Resolver, "ttl_s"),)),
    ("processes.md", "until it is written ({:g} s)", (key_use.FLUSH_INTERVAL_S,)),
    (
        "failure-modes.md",
        "tried again after {:g} s … {:g} s",
        (failures.FIRST_BACKOFF_S, failures.LAST_BACKOFF_S),
    ),
    ("failure-modes.md", "within {:g} s it is killed", (WATCH.hang_timeout_s,)),
    (
        "failure-modes.md",
        "killed after {:g} s",
        (supervisor.LAST_WORDS_S + supervisor.EXIT_WAIT_S,),
    ),
    ("failure-modes.md", "does not come within {:g} s", (supervisor.SPARE_CONNECT_TIMEOUT_S,)),
    ("failure-modes.md", "five deaths in {:g} s", (RESTART.window_s,)),
    ("failure-modes.md", "or reads nothing for {:g} s", (default(deps.ApiServices, "stall_timeout"),)),
    ("failure-modes.md", "an answer's end waits {:g} s for it at most", (journal.SYNC_WAIT_S,)),
    ("failure-modes.md", "after {:g} ms at most each server decides", (redis_limiter.TIMEOUT_S * 1000,)),
    ("failure-modes.md", "what is remembered serves for {:g} s", (STALENESS,)),
    ("audit.md", "at most {} such rows a minute", (audit_log.MAX_REFUSALS,)),
    ("audit.md", "A tenant's keys can change {} things a minute", (change_rate_limit.MAX_CHANGES,)),
    ("configuration.md", "may be {:g} KiB larger", (receive._FRAMING_BYTES / KIB,)),
    ("configuration.md", "beyond the usual {:g} s", (TTL_S,)),
    ("fairness.md", "An output token costs two", (CHARGES.decode == 2 * CHARGES.prefill,)),
    ("fairness.md", "costs {} units at least", (BLOCK_SIZE,)),
    ("embeddings.md", "counts as {} tokens at least", (BLOCK_SIZE,)),
    ("embeddings.md", "have {:g} MiB at most", (MAX_ANSWER_BYTES / MIB,)),
    (
        "embeddings.md",
        "{:,} inputs of a model with 576 numbers, or {:,}.",
        (most_inputs("float", 576), most_inputs("base64", 576)),
    ),
    ("fairness.md", "found in the prefix cache a tenth", (CHARGES.cached == 0.1 * CHARGES.prefill,)),
    ("fairness.md", "costs half a percent more for each of its ranks", (CHARGES.per_rank == 0.005,)),
    ("fairness.md", "three quarters of a unit for each", (CHARGES.load_per_rank == 0.75,)),
    ("fairness.md", "a block is kept free for each running request", (sequence_blocks._GROWTH == 1,)),
    ("limits.md", "Per tenant: {} [releases]", (release_runs.MAX_RUNS,)),
    ("limits.md", "{} looks in a round", (rounds.MAX_LOOKS,)),
    ("limits.md", "n + 1 of its {} changes a minute", (change_rate_limit.MAX_CHANGES,)),
    ("limits.md", "For concurrency it is {:g}", (limiter.PLACE_RETRY_S,)),
    ("limits.md", "at most an eighth of what is left", (budget_store.SPARE_PART == 8,)),
    ("limits.md", "`Retry-After` of {:g}.", (budgets.HELD_RETRY_S,)),
    ("limits.md", "slices serve on, for at most {:g} s", (SLICE_S / 2,)),
    ("limits.md", "its slice comes back after {:g} minutes", (SLICE_S / 60,)),
    ("limits.md", "what was reserved in the {:g} s before", (budgets.REPORT_INTERVAL_S,)),
    ("limits.md", "a request that runs for more than {:g} s on a server", (SLICE_S / 2,)),
    ("limits.md", "`spent` is up to {:g} s late", (budgets.REPORT_INTERVAL_S,)),
    ("limits.md", "comes back within {:g} s.", (lua("LEASE") + lua("SLACK"),)),
    ("limits.md", "just then waits {:g} ms at most", (redis_limiter.TIMEOUT_S * 1000,)),
    ("limits.md", "comes back after more than {:g} s", (lua("LEASE"),)),
    ("metrics.md", "Up to {:,} tenants have labels", (api_metrics.MAX_LABEL_SETS,)),
    ("metrics.md", "up to {:,} pairs of `tenant`", (api_metrics.MAX_LABEL_SETS,)),
    ("metrics.md", "A pair that had no request for {:g} hour", (label_sets.IDLE_S / 3600,)),
    ("metrics.md", "A tenant that had no request for {:g} hour", (label_sets.IDLE_S / 3600,)),
    ("metrics.md", "each at most {} names", (engine_metrics.MAX_NAMED_ADAPTERS,)),
    ("metrics.md", "names at most {} adapters", (engine_metrics.MAX_NAMED_ADAPTERS,)),
    ("metrics.md", "within two seconds", (default(Scraper, "engine_timeout") == 2,)),
    ("operations.md", "which allows it {:g} minutes", (START_MINUTES,)),
    ("operations.md", "no process has started with for {:g} days", (numba_cache.KEPT_S / DAY,)),
    ("operations.md", "less than {:g} MiB are free", (numba_cache._NEEDED_BYTES / MIB,)),
    ("operations.md", "For `--drain-grace` seconds ({:g})", (setting("drain_grace"),)),
    ("operations.md", "`--drain-timeout` seconds ({:g})", (setting("drain_timeout"),)),
    ("operations.md", "is noticed within {:g} s and killed", (WATCH.hang_timeout_s,)),
    ("operations.md", "A step may take four times as long", (watchdog.PATIENCE == 4,)),
    ("operations.md", "up to {:g} s; a start", (WATCH.new_step_timeout_s,)),
    ("operations.md", "a start {:g} s without a sign of life", (WATCH.start_silence_s,)),
    ("operations.md", "without a sign of life, and {:g} minutes in all", (START_MINUTES,)),
    (
        "operations.md",
        "started again after {:g} s, then {:.1g}, {:.1g}, … up to {:g} s",
        (*(RESTART.first_delay_s * RESTART.factor**n for n in range(3)), RESTART.max_delay_s),
    ),
    ("operations.md", "After five deaths within", (RESTART.max_deaths == 5,)),
    ("operations.md", "deaths within {:g} s", (RESTART.window_s,)),
    ("operations.md", "is tried for {:.1f} s", (sum(step_budget.PAUSES_S) - 0.05,)),
    ("database.md", "A server holds up to {} connections", (POOL,)),
    ("database.md", "in the last {:g} s (`--database-staleness`)", (STALENESS,)),
    ("database.md", "The server tries every half second", (outage.PROBE_INTERVAL_S == 0.5,)),
    (
        "database.md",
        "which a server notices within {:g} s, or {:g} s if it is silent",
        (database.CHECK_INTERVAL_S, database.CHECK_INTERVAL_S + postgres.READ_TIMEOUT_S),
    ),
    ("database.md", "does not come to its turn within {} s", (sqlite.BUSY_TIMEOUT_S,)),
    ("database.md", "does not come to its turn within {} s", (postgres_engine.LOCK_TIMEOUT_S,)),
    ("redis.md", "what it had reserved after {:g} s", (lua("LEASE"),)),
    ("redis.md", "slower than {:g} ms", (redis_limiter.TIMEOUT_S * 1000,)),
    ("redis.md", "after {:g} ms at most it is decided", (redis_limiter.TIMEOUT_S * 1000,)),
    ("redis.md", "`Retry-After: {:g}` |", (redis_limiter.UNDECIDED_RETRY_S,)),
    ("redis.md", "and then ten times a second", (redis_limiter.RETRY_S[-1] == 0.1,)),
    ("redis.md", "looks four times a second", (redis_limiter.HEARTBEAT_S == 0.25,)),
    ("redis.md", "set forward by more than a second", (lua("STEP") == 1,)),
    (
        "operations.md",
        "adapters on the device | a tenth of the free memory, at most {:g} GiB | a tenth of the free device "
        "memory, at most {:g} GiB",
        (sizing._MAX_ADAPTER_MEMORY["cpu"] / GIB, sizing._MAX_ADAPTER_MEMORY["cuda"] / GIB),
    ),
    ("operations.md", "a tenth of the free memory", (sizing._ADAPTER_FRACTION == 0.1,)),
    (
        "operations.md",
        "KV cache | {:g} of the free memory, at most {:g} GiB | what the largest step and the recordings leave, less "
        "{:g} of the device memory (at least {:g} MiB)",
        (
            kv_cache._CPU_FRACTION,
            kv_cache._CPU_LIMIT / GIB,
            device_memory.HEADROOM_SHARE,
            device_memory.MIN_HEADROOM / MIB,
        ),
    ),
    (
        "operations.md",
        "adapters in host memory | a tenth of the free memory, at most {:g} GiB",
        (sizing.MAX_ADAPTER_CPU_MEMORY / GIB,),
    ),
    ("operations.md", "A block holds {} positions and takes {} · layers", (BLOCK_SIZE, BLOCK_SIZE)),
    (
        "operations.md",
        "in pages of {:g} KiB to {:g} MiB",
        (layout.MIN_PAGE_BYTES / KIB, layout.MAX_PAGE_BYTES / MIB),
    ),
    ("operations.md", "At most {} adapters are on the device", (sizing.MAX_SLOTS,)),
    ("operations.md", "After {:g} s of waiting", (default(SchedulerConfig, "adapter_wait_aging_s"),)),
    (
        "structured-output.md",
        "| a schema, as compact JSON | {:g} KiB, {} levels |",
        (schema_rules.MAX_SCHEMA_BYTES / KIB, schema_rules.MAX_SCHEMA_DEPTH),
    ),
    ("structured-output.md", "| a pattern | {:g} KiB |", (builders.MAX_REGEX_BYTES / KIB,)),
    (
        "structured-output.md",
        "| choices | {}, {:g} KiB together |",
        (builders.MAX_CHOICES, builders.MAX_GRAMMAR_BYTES / KIB),
    ),
    ("structured-output.md", "of a decision | {}, {}", (decision.MAX_CHOICES, decision.MAX_CHOICE_TOKENS)),
    ("structured-output.md", "| a grammar | {:g} KiB |", (builders.MAX_GRAMMAR_BYTES / KIB,)),
    (
        "structured-output.md",
        "| text that a schema, a pattern or a grammar dictates at one place, such as a constant | {:g} KiB |",
        (dictated.MAX_DICTATED_BYTES / KIB,),
    ),
    (
        "structured-output.md",
        "{:g} seconds of processor time and {:g} MiB",
        (GRAMMARS.cpu_s, GRAMMARS.memory / MIB),
    ),
    (
        "structured-output.md",
        "may use {:g} s at once and {:g} % of a core over time",
        (GRAMMARS.burst_s, checker.CPU_SHARE * 100),
    ),
    ("structured-output.md", "run at a time ({})", (GRAMMARS.at_once,)),
    (
        "adapters.md",
        "A conversation may take {:g} s of processing time (and {:g} µs more for each token of the context) "
        "and {:g} MiB",
        (TEMPLATES.cpu_s, renderer.TOKEN_S * 1e6, TEMPLATES.memory / MIB),
    ),
    (
        "adapters.md",
        "may use {:g} s of processing time at once and {:g} % of a core over time",
        (TEMPLATES.burst_s, renderer.CPU_SHARE * 100),
    ),
    (
        "admin.md",
        "`chat_template.jinja` ({:g} KiB at most), `tokenizer_config.json` ({:g} MiB), `special_tokens_map.json` "
        "({:g} KiB), `generation_config.json` ({:g} KiB) and `additional_chat_templates/tool_use.jinja` ({:g} KiB)",
        tuple(most / (MIB if most >= MIB else KIB) for most in CHAT_FILE_BYTES.values()),
    ),
    ("usage.md", "# the last {} days", (DEFAULT_PERIOD.days,)),
    ("usage.md", "| {} days before `end`; now", (DEFAULT_PERIOD.days,)),
    ("usage.md", "`limit`, `cursor` | {} ", (rules.DEFAULT_PAGE,)),
    ("usage.md", "waits for it for {:g} s at most", (journal.SYNC_WAIT_S,)),
    ("usage.md", "{:g} MiB are more than a million requests", (setting("usage_journal_size") / MIB,)),
    ("usage.md", "a few thousand at a time", (roll_up.CHUNK_ROWS == 2000,)),
    ("reliability.md", "a body comes at {:,} bytes a second", (body.MIN_BYTES_PER_S,)),
    ("reliability.md", "a write that waits {} s is a 503", (sqlite.BUSY_TIMEOUT_S,)),
    (
        "cluster.md",
        "a frame may have {:g} KiB, the handshake {:g} s, and {} connections may be in it",
        (hello.MAX_FRAME_BYTES / KIB, hello.HANDSHAKE_S, members.MAX_HANDSHAKES),
    ),
    ("cluster.md", "it waits up to {:g} s for one of them", (failover.PATIENCE_S,)),
    ("cluster.md", "logs the first {} reasons of an address", (members.MAX_LOGGED_REASONS,)),
    ("cluster.md", "Addresses beyond {} share", (members.MAX_LOGGED_PEERS,)),
    (
        "cluster.md",
        "dials again after {:g} to {:g} s",
        (default(DialPolicy, "first_s"), default(DialPolicy, "most_s")),
    ),
    ("cluster.md", "nothing has come from the first for {:g} s", (members.SILENT_S,)),
    (
        "cluster.md",
        "the server notices within {:g} s (heartbeats), the engine within {:g} s (TCP)",
        (default(watchdog.WatchdogPolicy, "hang_timeout_s") - watchdog.MARGIN_S, tcp.PEER_TIMEOUT_S),
    ),
    ("cluster.md", "the engine hangs up at {:g} MiB", (tcp.MAX_UNSENT_BYTES / MIB,)),
    (
        "cluster.md",
        "filled above {:g} on average in any of the three",
        (policy.FULL,),
    ),
    ("cluster.md", "the others would stay below {:g}, for", (policy.EMPTY,)),
    ("cluster.md", "While engines start, for at most {:g} s,", (policy.STARTING_S,)),
    ("cluster.md", "it gets no requests beyond {:g} MiB", (tcp.MAX_UNSENT_BYTES / MIB,)),
    ("cluster.md", "when it has read nothing for {:g} s", (tcp.UNREAD_S,)),
    (
        "reliability.md",
        "no more positions than {:g} MiB of logits hold",
        (device_parts._MAX_SCORED_BYTES / MIB,),
    ),
]


def plain(page: str) -> str:
    return " ".join(markdown.read(f"docs/{page}").split())


@pytest.mark.parametrize(
    ("page", "phrase", "values"), CLAIMS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_number_is_the_constant_of_the_code(page: str, phrase: str, values: tuple[Any, ...]) -> None:
    """A phrase without a place for a number spells it out; its value here is whether that is so."""
    if "{" not in phrase:
        assert values == (True,), f"docs/{page} says {phrase!r}, and the code has another number"
    assert phrase.format(*values) in plain(page), f"docs/{page}: {phrase.format(*values)!r}"


def test_two_names_of_one_thing_agree() -> None:
    assert read_through.DEFAULT_STALENESS_S == STALENESS
    assert setting("usage_journal_size") == journal.DEFAULT_CAPACITY
    assert default(Resolver, "ttl_s") == TTL_S
    assert default(deps.ApiServices, "default_max_tokens") == setting("default_max_tokens")
    assert lua("STEP") == redis_session.STEP_US / 1e6


def test_other_servers_follow_within_the_5_s_that_are_promised() -> None:
    assert "the others follow within 5 s" in plain("database.md")
    assert TTL_S + tenant_terms.INTERVAL_S < 5
