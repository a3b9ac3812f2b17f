"""All servers of an installation."""

from __future__ import annotations

from tools.dashboards.model import INSTANCES, Board, Panel, Query, Row, quantiles, rates, share
from tools.dashboards.replicas import REPLICAS

_SPECULATION = "loraplex_speculation_tokens_total"
_DRAFTED, _ACCEPTED = 'outcome="drafted"', 'outcome="accepted"'

_SERVES = Row(
    "Does it serve?",
    (
        Panel(
            "Engines up",
            "Servers that Prometheus reaches, and those whose engine takes requests. Both should be the number of "
            "servers.",
            "none",
            (
                Query("sum(up{<servers>})", "reached"),
                Query("sum(loraplex_engine_up{<servers>})", "engine up"),
            ),
            ("LoraplexTargetDown", "LoraplexEngineDown"),
            kind="number",
        ),
        Panel(
            "Answers by status",
            "All answers of the data port, those to wrong keys and unknown models included.",
            "reqps",
            (rates("loraplex_http_responses_total", "status", some=True),),
            kind="stack",
        ),
        Panel(
            "Errors of the server",
            "Share of 5xx of all answers of the data port. The alert looks at requests whose model was resolved.",
            "percentunit",
            (share("loraplex_http_responses_total", 'status=~"5.."', legend="5xx"),),
            ("LoraplexErrorRate",),
        ),
        Panel(
            "Requests being answered",
            "HTTP requests of the data port at this moment, by server.",
            "short",
            (Query("sum by (instance) (loraplex_http_requests_in_flight{<servers>})", "{{instance}}"),),
        ),
        Panel(
            "Restarts and lost tasks",
            "Engine processes and background tasks that were started again, and steps that did not fit into the "
            "device's memory, in the time that is shown. All should be 0.",
            "none",
            (
                Query("sum(increase(loraplex_engine_restarts_total{<servers>}[$__range]))", "engines"),
                Query("sum(increase(loraplex_background_task_restarts_total{<servers>}[$__range]))", "tasks"),
                Query(
                    "sum(increase(loraplex_engine_out_of_memory_total{<servers>}[$__range]))", "out of memory"
                ),
            ),
            ("LoraplexEngineDown",),
            kind="number",
        ),
        Panel(
            "Clients lost",
            "Clients that hung up (gone), or read nothing until the server gave up (stalled).",
            "ops",
            (rates("loraplex_streams_cut_total", "reason"),),
        ),
    ),
)

_LATENCY = Row(
    "How fast?",
    (
        Panel(
            "Time to the first token",
            "From handing a sequence to the engine to its first token: queue, load of the adapter and prefill.",
            "s",
            quantiles("vllm:time_to_first_token_seconds", 0.5, 0.95, 0.99),
            ("LoraplexQueueTime",),
        ),
        Panel(
            "Time between tokens",
            "Between two tokens of a sequence; tokens that come together share the time.",
            "s",
            quantiles("vllm:inter_token_latency_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Time in the queue",
            "From arrival in the engine to the first step. Sequences that have not begun are not in it.",
            "s",
            quantiles("vllm:request_queue_time_seconds", 0.5, 0.95),
            ("LoraplexQueueTime",),
        ),
        Panel(
            "Time of a whole sequence",
            "From handing a sequence to the engine to its last token.",
            "s",
            quantiles("vllm:e2e_request_latency_seconds", 0.5, 0.95, 0.99),
        ),
    ),
)

_LOAD = Row(
    "How full?",
    (
        Panel(
            "Sequences that run",
            "Places of the batch in use, and how many there are.",
            "short",
            (
                Query("sum(vllm:num_requests_running{<servers>})", "running"),
                Query('sum(loraplex_engine_capacity{<servers>,kind="running"})', "places"),
            ),
        ),
        Panel(
            "Sequences that wait",
            "By server, those for their adapter included. Beyond --max-waiting requests get 503.",
            "short",
            (Query("sum by (instance) (vllm:num_requests_waiting{<servers>})", "{{instance}}"),),
            ("LoraplexRequestsWaiting",),
        ),
        Panel(
            "KV blocks in use",
            "Share of the KV blocks that running sequences hold, by server. Cached blocks count as free.",
            "percentunit",
            (Query("max by (instance) (vllm:kv_cache_usage_perc{<servers>})", "{{instance}}"),),
            ("LoraplexKvPressure",),
            most=1,
        ),
        Panel(
            "Preemptions",
            "Sequences that lost their KV blocks or place to others, and are computed again.",
            "ops",
            (Query("sum(rate(vllm:num_preemptions_total{<servers>}[$__rate_interval]))", "preempted"),),
            ("LoraplexKvPressure",),
        ),
        Panel(
            "Tokens",
            "Prompt, cached and output tokens of sequences that have ended.",
            "ops",
            (
                Query("sum(rate(vllm:prompt_tokens_total{<servers>}[$__rate_interval]))", "prompt"),
                Query("sum(rate(vllm:prompt_tokens_cached_total{<servers>}[$__rate_interval]))", "cached"),
                Query("sum(rate(vllm:generation_tokens_total{<servers>}[$__rate_interval]))", "output"),
            ),
        ),
        Panel(
            "Prefix cache hits",
            "Share of the prompt tokens that were found in the prefix cache.",
            "percentunit",
            (
                Query(
                    "sum(rate(vllm:prefix_cache_hits_total{<servers>}[$__rate_interval])) "
                    "/ sum(rate(vllm:prefix_cache_queries_total{<servers>}[$__rate_interval]))",
                    "hits",
                ),
            ),
            most=1,
        ),
        Panel(
            "Tokens in a step",
            "Mean over the steps of the engine: how well steps are filled.",
            "short",
            (
                Query(
                    "sum by (instance) (rate(vllm:iteration_tokens_total_sum{<servers>}[$__rate_interval])) "
                    "/ sum by (instance) (rate(vllm:iteration_tokens_total_count{<servers>}[$__rate_interval]))",
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Drafted tokens",
            "Tokens that were guessed and verified, from the sequence itself (own) or earlier answers (history), and "
            "those of them that were accepted.",
            "ops",
            (
                Query(
                    f"sum by (source) (rate({_SPECULATION}{{<servers>,{_DRAFTED}}}[$__rate_interval]))",
                    "drafted: {{source}}",
                ),
                Query(f"sum(rate({_SPECULATION}{{<servers>,{_ACCEPTED}}}[$__rate_interval]))", "accepted"),
            ),
        ),
        Panel(
            "Drafts accepted",
            "Share of the drafted tokens that were accepted; 0 where none was drafted.",
            "percentunit",
            (
                Query(
                    f"sum(rate({_SPECULATION}{{<servers>,{_ACCEPTED}}}[$__rate_interval])) "
                    f"/ (sum(rate({_SPECULATION}{{<servers>,{_DRAFTED}}}[$__rate_interval])) > 0) "
                    f"or sum(rate({_SPECULATION}{{<servers>,{_DRAFTED}}}[$__rate_interval])) * 0",
                    "accepted",
                ),
            ),
            most=1,
        ),
        Panel(
            "Tenants with the most requests",
            "The ten tenants with most requests of this moment. Tenants without a label of their own are `other`.",
            "reqps",
            (
                Query(
                    "topk(10, sum by (tenant) (rate(loraplex_tenant_requests_total{<servers>}[$__rate_interval])))",
                    "{{tenant}}",
                ),
            ),
        ),
    ),
)

ADAPTER_MEMORY = (
    Panel(
        "Loads and evictions",
        "Adapters read from the disk, copied to the device, and evicted for others. Evictions beside copies, while "
        "memory is full, are thrash.",
        "ops",
        (
            rates("loraplex_adapter_loads_total", "stage", "loaded: {{stage}}"),
            rates("loraplex_adapter_evictions_total", "tier", "evicted: {{tier}}"),
        ),
        ("LoraplexAdapterThrash",),
    ),
    Panel(
        "Adapter memory in use",
        "Share of the memory for adapters, of device and host.",
        "percentunit",
        (
            Query(
                'sum by (instance, tier) (loraplex_adapter_cache_bytes{<servers>,kind="used"}) '
                '/ sum by (instance, tier) (loraplex_adapter_cache_bytes{<servers>,kind="capacity"})',
                "{{tier}} {{instance}}",
            ),
        ),
        ("LoraplexAdapterThrash",),
        most=1,
    ),
    Panel(
        "Slots",
        "Slots of adapters on the device, in use and in all.",
        "short",
        (Query("sum by (kind) (loraplex_adapter_slots{<servers>})", "{{kind}}"),),
    ),
    Panel(
        "Time of a load",
        "By stage: from the disk to host memory, and from there to the device. The latest load of each version.",
        "s",
        quantiles("loraplex_adapter_load_seconds", 0.5, 0.95, by="stage"),
    ),
    Panel(
        "Versions by place",
        "Versions that the engine knows: on the device (hot), in host memory (warm), on the disk (cold), and on their "
        "way (loading).",
        "short",
        (Query("sum by (state) (loraplex_adapter_versions{<servers>})", "{{state}}"),),
        kind="stack",
    ),
    Panel(
        "Failed loads",
        "Loads that failed: damaged or missing files, or too little memory. The log's line names the version.",
        "none",
        (Query("sum(increase(loraplex_adapter_load_failures_total{<servers>}[$__range]))", "failed"),),
        kind="number",
    ),
)

_LIMITS = Row(
    "Limits, usage and storage",
    (
        Panel(
            "429 by limit",
            "Requests refused, by the limit that they were told: whose it is, and of what.",
            "reqps",
            (
                rates(
                    "loraplex_limiter_limits_reached_total", "owner, limit", "{{owner}}: {{limit}}", some=True
                ),
            ),
            kind="stack",
        ),
        Panel(
            "Decisions over limits",
            "By outcome. `unavailable` are 503, because Redis or the database did not answer.",
            "reqps",
            (rates("loraplex_limiter_decisions_total", "outcome"),),
            ("LoraplexRedisApart",),
        ),
        Panel(
            "Apart from Redis",
            "Servers that decide by themselves, and what they passed and refused meanwhile.",
            "short",
            (
                Query("sum(loraplex_limiter_apart{<servers>})", "servers apart"),
                rates("loraplex_limiter_apart_decisions_total", "result", "{{result}} a second"),
            ),
            ("LoraplexRedisApart",),
        ),
        Panel(
            "Time of Redis",
            "Time of a decision that Redis made. Without Redis there is none.",
            "s",
            quantiles("loraplex_limiter_redis_seconds", 0.5, 0.99),
            ("LoraplexRedisApart",),
        ),
        Panel(
            "Ledger lag",
            "For how long the oldest row of usage has been waiting for the database, by server.",
            "s",
            (Query("max by (instance) (loraplex_usage_lag_seconds{<servers>})", "{{instance}}"),),
            ("LoraplexLedgerLag",),
        ),
        Panel(
            "Usage journal",
            "Disk that the journal takes, by server. It is empty again when the database has all rows.",
            "bytes",
            (Query("max by (instance) (loraplex_usage_journal_bytes{<servers>})", "{{instance}}"),),
            ("LoraplexLedgerFull",),
        ),
        Panel(
            "Disk left",
            "What is left of the disks that hold a server's data, adapters, and models with compiled kernels.",
            "bytes",
            (
                Query(
                    "min by (instance, directory) (loraplex_disk_free_bytes{<servers>})",
                    "{{instance}} {{directory}}",
                ),
            ),
            ("LoraplexDiskFilling",),
        ),
        Panel(
            "Database away",
            "For how long a server has not reached its database; 0 while it does.",
            "s",
            (Query("max by (instance) (loraplex_database_outage_seconds{<servers>})", "{{instance}}"),),
            ("LoraplexDatabaseDown",),
        ),
        Panel(
            "Changes by the admin API",
            "Changes in the time that is shown, by the audit log's action.",
            "none",
            (
                Query(
                    "sum by (action) (increase(loraplex_admin_changes_total{<servers>}[$__range])) > 0",
                    "{{action}}",
                ),
            ),
            kind="number",
        ),
    ),
)

FLEET = Board(
    "loraplex-fleet",
    "Loraplex / Fleet",
    "All servers: do they serve, how fast, how full, and what is refused.",
    (_SERVES, _LATENCY, _LOAD, REPLICAS, Row("Adapters", ADAPTER_MEMORY), _LIMITS),
    INSTANCES,
)
