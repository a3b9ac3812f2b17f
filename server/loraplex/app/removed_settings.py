"""Settings that were taken away, and what to use instead of each."""

from __future__ import annotations

_LEAVE_OUT = "leave it out; the server "
_REMOVED = {
    **{
        f"server_{name}": f"use --server-limit {name}=VALUE"
        for name in (
            "requests_per_minute", "tokens_per_minute", "max_concurrency", "max_sequences", "max_output_tokens",
            "token_budget", "budget_period",
        )
    },
    "engine_host": "use --engine-port HOST:PORT",
    "engine_tls_cert": "use --engine-tls DIR, with the certificate as tls.crt",
    "engine_tls_key": "use --engine-tls DIR, with the key as tls.key",
    "engine_tls_ca": "use --engine-tls DIR, with what an engine trusts as ca.crt",
    "replica_manager": "use --ray-address local (Ray here) or none (no Ray)",
    "trace_follow_caller": "use --trace-sample-ratio caller",
    "otlp_headers": "use the variable OTEL_EXPORTER_OTLP_HEADERS",
    "otlp_service_name": "use the variable OTEL_SERVICE_NAME",
    "adapter_base_error": f"{_LEAVE_OUT}measures one version at a time, at the lowest priority",
    "adapter_base_error_warning": f"{_LEAVE_OUT}warns from 0.1 nats a token; reports have the figure",
    "adapter_image_cache": f"{_LEAVE_OUT}keeps 2 GiB at most, and 1 GiB of the disk free",
    "adapter_load_timeout": f"{_LEAVE_OUT}ends a load after 60 s",
    "grammar_processes": f"{_LEAVE_OUT}checks two at a time",
    "grammar_time_limit": f"{_LEAVE_OUT}gives each 0.5 s of processor time",
    "lookahead": f"{_LEAVE_OUT}plans ahead on a GPU alone",
    "recorded_prompt_rows": f"{_LEAVE_OUT}chooses by GPU and model",
    "scale_up_delay": f"{_LEAVE_OUT}waits 10 s",
    "scale_down_delay": f"{_LEAVE_OUT}waits 300 s",
    "stream_stall_timeout": f"{_LEAVE_OUT}cuts a client that reads nothing after 30 s",
}  # fmt: skip
REMOVED_SWITCHES = frozenset({"trace_follow_caller", "adapter_base_error"})
"""Those of them that were `--NAME` and `--no-NAME`."""


def removed_settings() -> tuple[str, ...]:
    return tuple(_REMOVED)


def instead_of(name: str) -> str:
    """The advice for a setting that was taken away; empty for any other name."""
    return _REMOVED.get(name, "")
