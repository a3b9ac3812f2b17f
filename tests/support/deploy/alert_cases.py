"""For each alert a server that it is for, and servers that come near; as promtool's unit tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """`at`: the minute at which it fires, and not one earlier. `series`: metric with its own labels → values a minute,
    of each server by its letter. Server `a` is the one that it is for, unless the alert is about all servers.
    `labels`: what the alert has beside those of its server."""

    at: int
    summary: str
    series: Mapping[str, Mapping[str, str]]
    labels: Mapping[str, str] = field(default_factory=dict)
    by_server: bool = True
    """The alert has the labels of its server."""
    near: Mapping[str, str] = field(default_factory=dict)
    """For alerts about all servers: the values of `series` that do not bring it."""
    only_server: bool = False
    """It has the label that tells servers apart, and no other of its series."""


CASES: dict[str, Case] = {
    "LoraplexTargetDown": Case(
        5,
        "Prometheus does not reach the server a",
        {"up": {"a": "0x30", "b": "1x30", "c": "0x4 1 0x3 1x20"}},
    ),
    "LoraplexEngineDown": Case(
        5,
        "The engine of a takes no requests",
        {"loraplex_engine_up": {"a": "0x30", "b": "1x30", "c": "0x4 1 0x3 1x20"}},
    ),
    "LoraplexErrorRate": Case(
        6,
        "6% of the answers are errors of the server",
        {
            'loraplex_tenant_requests_total{status="500"}': {"a": "0+40x30"},
            'loraplex_tenant_requests_total{status="503"}': {"a": "0+20x30"},
            'loraplex_tenant_requests_total{status="200"}': {"a": "0+740x30"},
            'loraplex_tenant_requests_total{status="429"}': {"a": "0+200x30"},
        },
        by_server=False,
        near={
            'loraplex_tenant_requests_total{status="500"}': "0+29x30",
            'loraplex_tenant_requests_total{status="503"}': "0+20x30",
        },
    ),
    "LoraplexQueueTime": Case(
        11,
        "One sequence in twenty waits longer than 7.5s for its first step",
        {
            'vllm:request_queue_time_seconds_bucket{le="5"}': {"a": "0+90x30"},
            'vllm:request_queue_time_seconds_bucket{le="10"}': {"a": "0+100x30"},
            'vllm:request_queue_time_seconds_bucket{le="+Inf"}': {"a": "0+100x30"},
        },
        by_server=False,
        near={'vllm:request_queue_time_seconds_bucket{le="5"}': "0+96x30"},
    ),
    "LoraplexRequestsWaiting": Case(
        10,
        "257 sequences wait on a",
        {
            'vllm:num_requests_waiting{model_name="m"}': {
                "a": "257x30",
                "b": "256x30",
                "c": "257x9 1 257x9 1x9",
            }
        },
        labels={"model_name": "m"},
    ),
    "LoraplexKvPressure": Case(
        15,  # a rate over 5 minutes that is just too high is so after 5 minutes
        "The KV cache of a is full, and sequences are preempted",
        {
            'vllm:kv_cache_usage_perc{model_name="m"}': {"a": "0.96x30", "b": "0.96x30", "c": "0.94x30"},
            'vllm:num_preemptions_total{model_name="m"}': {"a": "0+66x30", "b": "0+54x30", "c": "0+66x30"},
        },
        labels={"model_name": "m"},
    ),
    "LoraplexAdapterThrash": Case(
        20,
        "Adapters of a evict each other from the device",
        {
            'loraplex_adapter_loads_total{stage="copy"}': {"a": "0+33x30", "b": "0+27x30", "c": "0+33x30"},
            'loraplex_adapter_loads_total{stage="disk"}': {"a": "0+33x30", "b": "0+33x30", "c": "0+33x30"},
            'loraplex_adapter_cache_bytes{tier="device",kind="used"}': {
                "a": "91x30",
                "b": "91x30",
                "c": "89x30",
            },
            'loraplex_adapter_cache_bytes{tier="device",kind="capacity"}': dict.fromkeys("abc", "100x30"),
        },
        only_server=True,
    ),
    "LoraplexReplicasMissing": Case(
        10,
        "1 engines of a take no requests; the others serve",
        {
            'loraplex_replicas{state="wanted"}': {"a": "3x30", "b": "3x30", "c": "3x30"},
            'loraplex_replicas{state="ready"}': {"a": "2x30", "b": "0x30", "c": "2x9 3 2x9 3x10"},
            'loraplex_replicas{state="away"}': {"a": "1x30", "b": "3x30", "c": "1x9 0 1x9 0x10"},
        },
        only_server=True,
    ),
    "LoraplexReplicaFlapping": Case(
        9,  # one each two minutes: above three after eight
        "Engines of a come and go",
        {
            'loraplex_replica_restarts_total{replica="replica-1"}': {
                "a": "0 0 1 1 2 2 3 3 4 4 5 5 6 6 7 7 8 8 9 9 10 10 11 11 12 12 13 13 14 14 15",
                "b": "0+0x30",
                "c": "0 1 2 2x28",
            },
            'loraplex_replicas{state="ready"}': {"a": "2x30", "b": "2x30", "c": "2 1 2 1 2x28"},
        },
        only_server=True,
    ),
    "LoraplexFailovers": Case(
        10,
        "12 sequences a minute of a lose their engine and go on with another",
        {"loraplex_failed_over_sequences_total": {"a": "0+12x30", "b": "0+9x30", "c": "0 40 40x28"}},
    ),
    "LoraplexRayManagerLost": Case(
        5,
        "Ray of a ends again and again",
        {"loraplex_managers_lost_total": {"a": "0 1 1 1 2 2x26", "b": "0 1 1x28", "c": "0x30"}},
    ),
    "LoraplexLedgerLag": Case(
        5,
        "Usage of a has waited for the database for 5m 1s",
        {"loraplex_usage_lag_seconds": {"a": "301x30", "b": "300x30", "c": "301x4 0 301x4 0x9"}},
    ),
    "LoraplexLedgerFull": Case(
        1,
        "a refuses requests, because their usage could not be recorded",
        {"loraplex_usage_journal_full": {"a": "1x30", "b": "0x30", "c": "1 0 1 0x27"}},
    ),
    "LoraplexRedisApart": Case(
        1,
        "a decides over limits by itself, without Redis",
        {"loraplex_limiter_apart": {"a": "1x30", "b": "0x30", "c": "1 0 1 0x27"}},
    ),
    "LoraplexDatabaseDown": Case(
        1,
        "a does not reach its database",
        {"loraplex_database_up": {"a": "0x30", "b": "1x30", "c": "0 1 0 1x27"}},
    ),
    "LoraplexDiskFilling": Case(
        10,
        "The disk of the data directory of a has 9% left",
        {
            'loraplex_disk_free_bytes{directory="data"}': {
                "a": "9x30",
                "b": "11x30",
                "c": "9x9 11 9x9 11x10",
            },
            'loraplex_disk_bytes{directory="data"}': dict.fromkeys("abc", "100x30"),
        },
        {"directory": "data"},
    ),
}


@dataclass(frozen=True)
class Scraped:
    """How series of servers are labelled: `common` labels, and the one that tells servers apart."""

    common: Mapping[str, str]
    server: str

    def labels(self, server: str) -> dict[str, str]:
        return {**self.common, self.server: server}


def _series(written: str, scraped: Scraped, server: str) -> str:
    metric, _, own = written.partition("{")
    labels = ",".join(f'{name}="{value}"' for name, value in scraped.labels(server).items())
    return f"{metric}{{{labels}{',' if own else ''}{own or '}'}"


def promtool_tests(rules: list[dict[str, Any]], rule_file: str, scraped: Scraped) -> dict[str, Any]:
    """The document for `promtool test rules`: each alert fires for its server at its minute and not before, and for no
    server that comes near, at no minute of half an hour."""
    tests = []
    for rule in rules:
        name, case = rule["alert"], CASES[rule["alert"]]
        given = [
            {"series": _series(written, scraped, server), "values": values}
            for written, of in case.series.items()
            for server, values in of.items()
        ]
        labels = {"severity": rule["labels"]["severity"], **case.labels}
        if case.only_server:
            labels[scraped.server] = "a"
        elif case.by_server:
            labels |= scraped.labels("a")
        annotations = rule["annotations"] | {"summary": case.summary}
        fired = [{"exp_labels": labels, "exp_annotations": annotations}]
        checks = [
            {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": fired if minute >= case.at else []}
            for minute in range(30)
        ]
        tests.append({"interval": "1m", "input_series": given, "alert_rule_test": checks})
        if case.near:
            almost = [
                {"series": _series(written, scraped, "a"), "values": case.near.get(written, of["a"])}
                for written, of in case.series.items()
            ]
            quiet = [{"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []} for minute in range(30)]
            tests.append({"interval": "1m", "input_series": almost, "alert_rule_test": quiet})
    return {"rule_files": [rule_file], "evaluation_interval": "1m", "tests": tests}
