"""The engines behind each server, one by one."""

from __future__ import annotations

from tools.dashboards.model import Panel, Query, Row

_EACH = "{{instance}} {{replica}}"

REPLICAS = Row(
    "Engines",
    (
        Panel(
            "Engines by state",
            "Engines of all servers. Ready should be as many as wanted; draining ones finish what they have.",
            "none",
            (Query("sum by (state) (loraplex_replicas{<servers>})", "{{state}}"),),
            ("LoraplexReplicasMissing",),
        ),
        Panel(
            "Restarts of each engine",
            "Processes that were started again, and managers of Ray that were lost, in the time that is shown. All "
            "should be 0.",
            "none",
            (
                Query(
                    "sum by (instance, replica) (increase(loraplex_replica_restarts_total{<servers>}[$__range]))",
                    _EACH,
                ),
                Query(
                    "sum by (instance) (increase(loraplex_managers_lost_total{<servers>}[$__range]))",
                    "{{instance}} manager",
                ),
            ),
            ("LoraplexReplicaFlapping", "LoraplexRayManagerLost"),
            kind="number",
        ),
        Panel(
            "Sequences of each engine",
            "Sequences that run and wait. Engines of one server should be about even.",
            "short",
            (
                Query(
                    "sum by (instance, replica) "
                    "(loraplex_replica_running{<servers>} + loraplex_replica_waiting{<servers>})",
                    _EACH,
                ),
            ),
        ),
        Panel(
            "KV blocks of each engine",
            "Share of its KV blocks that running sequences hold.",
            "percentunit",
            (Query("max by (instance, replica) (loraplex_replica_kv_usage{<servers>})", _EACH),),
            ("LoraplexKvPressure",),
            most=1.0,
        ),
        Panel(
            "Adapters of each engine",
            "Versions on its device (hot), and in its host memory alone (warm).",
            "short",
            (
                Query(
                    "sum by (instance, replica, state) (loraplex_replica_adapters{<servers>})",
                    f"{_EACH} {{{{state}}}}",
                ),
            ),
        ),
        Panel(
            "Lost engines and moves",
            "Sequences that went on with another engine after theirs was lost, those whose answer had begun among "
            "them, and adapters that moved without need.",
            "ops",
            (
                Query(
                    "sum(rate(loraplex_failed_over_sequences_total{<servers>}[$__rate_interval]))",
                    "sequences",
                ),
                Query("sum(rate(loraplex_continued_sequences_total{<servers>}[$__rate_interval]))", "begun"),
                Query("sum(rate(loraplex_adapter_moves_total{<servers>}[$__rate_interval]))", "moves"),
            ),
            ("LoraplexFailovers",),
        ),
    ),
)
