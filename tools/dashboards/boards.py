"""The four dashboards. One of a tenant, of an adapter and of a release stand beside that of the fleet."""

from __future__ import annotations

from tools.dashboards.fleet import ADAPTER_MEMORY, FLEET
from tools.dashboards.model import INSTANCES, Board, Panel, Query, Row, Variable, quantiles, share

_TENANT = Variable("tenant", "Tenant", 'label_values(loraplex_tenant_requests_total{job=~"$job"}, tenant)')
_OWN = '<servers>,tenant="$tenant"'
_TENANT_ERRORS = ("loraplex_tenant_requests_total", 'status=~"5.."', _OWN)

TENANT = Board(
    "loraplex-tenant",
    "Loraplex / Tenant",
    "One tenant: what it asks, what it gets, and its share beside the others.",
    (
        Row(
            "Requests",
            (
                Panel(
                    "Requests by status",
                    "Requests whose model was resolved, of all adapters of the tenant.",
                    "reqps",
                    (
                        Query(
                            "sum by (status) "
                            '(rate(loraplex_tenant_requests_total{<servers>,tenant="$tenant"}[$__rate_interval]))',
                            "{{status}}",
                        ),
                    ),
                    kind="stack",
                ),
                Panel(
                    "Errors of the server",
                    "Share of the tenant's requests that got a 5xx.",
                    "percentunit",
                    (share(*_TENANT_ERRORS, legend="5xx"),),
                    ("LoraplexErrorRate",),
                ),
                Panel(
                    "429 by code",
                    "rate_limit_exceeded: a rate or a number at a time; it passes after a wait. insufficient_quota: a "
                    "budget is spent.",
                    "reqps",
                    (
                        Query(
                            "sum by (code) "
                            '(rate(loraplex_limiter_refusals_total{<servers>,tenant="$tenant"}[$__rate_interval]))',
                            "{{code}}",
                        ),
                    ),
                ),
                Panel(
                    "Adapters with the most requests",
                    "The ten adapters of the tenant with most requests. Adapters without a label of their own are "
                    "`other`.",
                    "reqps",
                    (
                        Query(
                            "topk(10, sum by (adapter) "
                            '(rate(loraplex_requests_total{<servers>,tenant="$tenant"}[$__rate_interval])))',
                            "{{adapter}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Tokens and fair share",
            (
                Panel(
                    "Tokens",
                    "Prompt, cached and output tokens of the tenant's sequences that have ended.",
                    "ops",
                    (
                        Query(
                            'sum by (kind) (rate(loraplex_tokens_total{<servers>,tenant="$tenant"}[$__rate_interval]))',
                            "{{kind}}",
                        ),
                    ),
                ),
                Panel(
                    "Share of output tokens",
                    "Of all output tokens of the chosen servers. Under load it follows the weights of the tenants "
                    "that have requests.",
                    "percentunit",
                    (
                        Query(
                            'sum(rate(loraplex_tokens_total{<servers>,tenant="$tenant",kind="completion"}'
                            "[$__rate_interval])) "
                            '/ sum(rate(loraplex_tokens_total{<servers>,kind="completion"}[$__rate_interval]))',
                            "share",
                        ),
                    ),
                    most=1,
                ),
                Panel(
                    "Running and waiting",
                    "The tenant's sequences in the engines.",
                    "short",
                    (
                        Query('sum(loraplex_tenant_running{<servers>,tenant="$tenant"})', "running"),
                        Query('sum(loraplex_tenant_waiting{<servers>,tenant="$tenant"})', "waiting"),
                    ),
                    ("LoraplexRequestsWaiting",),
                ),
                Panel(
                    "Counter beside the least",
                    "How far the tenant's counter (service over weight) is ahead of the least of the tenants with "
                    "requests, by server. The scheduler serves the least first: a gap that grows means that the "
                    "others wait for adapters or have nothing to do.",
                    "short",
                    (
                        Query(
                            'max by (instance) (loraplex_tenant_virtual_tokens{<servers>,tenant="$tenant"}) '
                            "- min by (instance) (loraplex_tenant_virtual_tokens{<servers>})",
                            "{{instance}}",
                        ),
                    ),
                    ("LoraplexQueueTime",),
                ),
                Panel(
                    "Cached prompt tokens",
                    "Share of the tenant's prompt tokens that were in the prefix cache.",
                    "percentunit",
                    (
                        Query(
                            f'sum(rate(loraplex_tokens_total{{{_OWN},kind="cached"}}[$__rate_interval])) '
                            f'/ sum(rate(loraplex_tokens_total{{{_OWN},kind="prompt"}}[$__rate_interval]))',
                            "cached",
                        ),
                    ),
                    most=1,
                ),
                Panel(
                    "Gap between all tenants",
                    "The largest counter less the least, of tenants with requests on one server.",
                    "short",
                    (
                        Query(
                            "max by (instance) (loraplex_tenant_virtual_tokens{<servers>}) "
                            "- min by (instance) (loraplex_tenant_virtual_tokens{<servers>})",
                            "{{instance}}",
                        ),
                    ),
                ),
            ),
        ),
    ),
    (*INSTANCES, _TENANT),
)

_OF_TENANT = 'loraplex_requests_total{job=~"$job",tenant="$tenant"}'
_ADAPTER = Variable("adapter", "Adapter version", f"label_values({_OF_TENANT}, adapter)")
_THIS = '<servers>,tenant="$tenant",adapter="$adapter"'

ADAPTER = Board(
    "loraplex-adapter",
    "Loraplex / Adapter",
    "One adapter version of a tenant, and the memory for adapters.",
    (
        Row(
            "Requests",
            (
                Panel(
                    "Requests by status",
                    "Requests for this version. `base` is the base model, `other` all versions without a label.",
                    "reqps",
                    (
                        Query(
                            f"sum by (status) (rate(loraplex_requests_total{{{_THIS}}}[$__rate_interval]))",
                            "{{status}}",
                        ),
                    ),
                    kind="stack",
                ),
                Panel(
                    "Errors of the server",
                    "Share of 5xx, of this version and of all the tenant's. One version alone: its files or numbers.",
                    "percentunit",
                    (
                        share("loraplex_requests_total", 'status=~"5.."', _THIS, legend="this version"),
                        share(*_TENANT_ERRORS, legend="all of the tenant"),
                    ),
                    ("LoraplexErrorRate",),
                ),
                Panel(
                    "Share of the tenant's requests",
                    "Requests for this version of all the tenant's.",
                    "percentunit",
                    (
                        Query(
                            f"sum(rate(loraplex_requests_total{{{_THIS}}}[$__rate_interval])) "
                            '/ sum(rate(loraplex_tenant_requests_total{<servers>,tenant="$tenant"}[$__rate_interval]))',
                            "share",
                        ),
                    ),
                    most=1,
                ),
                Panel(
                    "Requests by server",
                    "Which servers serve this version: each of them loads it.",
                    "reqps",
                    (
                        Query(
                            f"sum by (instance) (rate(loraplex_requests_total{{{_THIS}}}[$__rate_interval]))",
                            "{{instance}}",
                        ),
                    ),
                ),
            ),
        ),
        Row("Memory for adapters, of all tenants", ADAPTER_MEMORY),
    ),
    (*INSTANCES, _TENANT, _ADAPTER),
)

_VERSIONS = '<servers>,tenant="$tenant",adapter=~"${release:regex}@v.*"'
_BY_VERSION = f"sum by (adapter) (rate(loraplex_requests_total{{{_VERSIONS}}}[$__rate_interval]))"

_WATCHED = Row(
    "While a guard or a schedule runs",
    (
        Panel(
            "Failed requests of each arm",
            "What the guard reads as errors: requests that the version failed, of those that the release sent to it. "
            "Empty where no release is watched.",
            "percentunit",
            (share("loraplex_release_requests_total", 'outcome="failed"', _VERSIONS, by="adapter"),),
        ),
        Panel(
            "Time to the first token by arm",
            "Median and p95 of each arm's requests. The guard compares them by user.",
            "s",
            quantiles("loraplex_release_first_token_seconds", 0.5, 0.95, by="adapter", of=_VERSIONS),
        ),
        Panel(
            "Time between tokens by arm",
            "Median and p95 of each request's mean time between two tokens.",
            "s",
            quantiles("loraplex_release_inter_token_seconds", 0.5, 0.95, by="adapter", of=_VERSIONS),
        ),
        Panel(
            "Watched releases",
            "Releases of all tenants whose guard or schedule runs, and whether a server decides for them: 0 deciding "
            "while some run is an outage of the guard.",
            "none",
            (
                Query("max(loraplex_releases_running{<servers>})", "running"),
                Query("sum(loraplex_release_leader{<servers>})", "deciding"),
            ),
        ),
        Panel(
            "Rolled back by guards",
            "Releases of all tenants that went back by themselves in the time that is shown, by the metric that broke "
            "its margin; `unusable` is a damaged version.",
            "none",
            (
                Query(
                    "sum by (reason) (increase(loraplex_release_rollbacks_total{<servers>}[$__range]))",
                    "{{reason}}",
                ),
            ),
            kind="number",
        ),
    ),
)

RELEASE = Board(
    "loraplex-release",
    "Loraplex / Release",
    "The versions of one adapter name side by side: the canary's share, its errors, and the changes of releases.",
    (
        Row(
            "Versions",
            (
                Panel(
                    "Requests by version",
                    "Requests that the release, or a version in the request, sent to each version.",
                    "reqps",
                    (Query(_BY_VERSION, "{{adapter}}"),),
                    kind="stack",
                ),
                Panel(
                    "Share of each version",
                    "What each version gets of the name's requests. With weights of 95 and 5 the canary is at 5%; "
                    "sticky callers move it.",
                    "percentunit",
                    (
                        Query(
                            f"{_BY_VERSION} / on () group_left () sum("
                            f"rate(loraplex_requests_total{{{_VERSIONS}}}[$__rate_interval]))",
                            "{{adapter}}",
                        ),
                    ),
                    most=1,
                ),
                Panel(
                    "Errors of the server by version",
                    "Share of 5xx of each version. A canary above the others is a reason to go back.",
                    "percentunit",
                    (share("loraplex_requests_total", 'status=~"5.."', _VERSIONS, by="adapter"),),
                    ("LoraplexErrorRate",),
                ),
                Panel(
                    "Refusals by version",
                    "Share of 4xx of each version: prompts that are too long for it, limits, wrong fields.",
                    "percentunit",
                    (share("loraplex_requests_total", 'status=~"4.."', _VERSIONS, by="adapter"),),
                ),
            ),
        ),
        _WATCHED,
        Row(
            "Changes of releases, of all tenants",
            (
                Panel(
                    "Changes",
                    "Releases that were set, promoted and rolled back in the time that is shown, and uploads.",
                    "none",
                    (
                        Query(
                            "sum by (action) (increase(loraplex_admin_changes_total"
                            '{<servers>,action=~"release.*|version.upload"}[$__range]))',
                            "{{action}}",
                        ),
                    ),
                    kind="number",
                ),
                Panel(
                    "Loads of adapters",
                    "A new version is loaded when it is released. Failed loads leave its requests with 503.",
                    "ops",
                    (
                        Query(
                            "sum by (stage) (rate(loraplex_adapter_loads_total{<servers>}[$__rate_interval]))",
                            "{{stage}}",
                        ),
                        Query(
                            "sum(rate(loraplex_adapter_load_failures_total{<servers>}[$__rate_interval]))",
                            "failed",
                        ),
                    ),
                    ("LoraplexAdapterThrash",),
                ),
            ),
        ),
    ),
    (*INSTANCES, _TENANT, Variable("release", "Adapter", _ADAPTER.query, pattern="/^(.*)@v[0-9]+$/")),
    (
        Query(
            "sum by (action) (increase(loraplex_admin_changes_total"
            '{<servers>,action=~"release.*"}[$__rate_interval])) > 0',
            "{{action}}",
        ),
    ),
)

BOARDS = (FLEET, TENANT, ADAPTER, RELEASE)
