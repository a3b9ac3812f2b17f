"""How help and documents group the settings, and which of them hardly anyone sets."""

from __future__ import annotations

GROUPS: dict[str, tuple[str, ...]] = {
    "Model": (
        "model", "served_model_name", "device", "dtype", "quantise", "max_model_len", "tokenizer", "tool_format",
        "reasoning_format", "adapter_templates", "default_max_tokens", "speculation", "kernels", "attention",
        "batch_invariant", "recorded_prompt_rows", "lookahead", "threads", "replicas", "max_replicas", "scale_up_delay",
        "scale_down_delay", "replica_manager", "ray_address", "engine_spare",
    ),
    "Memory": (
        "kv_cache_memory", "kv_cache_dtype", "adapter_memory", "adapter_cpu_memory", "adapter_image_cache",
        "max_num_seqs", "max_num_batched_tokens", "max_step_ms", "max_waiting",
    ),
    "Ports": (
        "host", "port", "public_url", "admin_host", "admin_port", "admin_token", "key_pepper", "engine_host",
        "engine_port", "engine_token_file", "engine_tls_cert", "engine_tls_key", "engine_tls_ca", "cors_origins",
        "metrics_on_data_port", "residency_metrics", "stream_stall_timeout", "drain_grace", "drain_timeout",
    ),
    "Limits": (
        "max_adapter_rank", "max_adapter_upload", "max_body", "adapter_load_timeout", "adapter_base_error",
        "adapter_base_error_warning", "grammar_processes", "grammar_time_limit", "keep_versions", "limits_when_apart",
        "server_limit",
    ),
    "Storage": (
        "data_dir", "database_url", "database_staleness", "redis_url", "artifact_url", "artifact_cache_size",
        "adapter_sources", "usage_keep_days", "usage_journal_size",
    ),
    "Telemetry": (
        "log_level", "otlp_endpoint", "otlp_headers", "otlp_service_name", "trace_sample_ratio", "trace_follow_caller",
        "webhook_url", "webhook_secret", "webhook_allow",
    ),
}  # fmt: skip
"""Names of settings by the panel of `--help` that shows them."""
ENGINE_SETTINGS = (
    "model", "served_model_name", "device", "dtype", "quantise", "max_model_len", "kernels", "attention",
    "batch_invariant", "recorded_prompt_rows", "lookahead", "speculation", "threads", "engine_spare", "kv_cache_memory",
    "kv_cache_dtype", "adapter_memory", "adapter_cpu_memory", "adapter_image_cache", "max_num_seqs",
    "max_num_batched_tokens", "max_step_ms", "max_waiting", "max_adapter_rank", "adapter_load_timeout", "data_dir",
    "artifact_url", "artifact_cache_size", "engine_token_file", "engine_tls_ca", "drain_timeout", "log_level",
)  # fmt: skip
"""Settings of an engine, which `loraplex engine` takes too."""
EXPERT = frozenset(
    {
        "adapter_base_error", "adapter_base_error_warning", "adapter_image_cache", "adapter_load_timeout",
        "artifact_cache_size", "attention", "database_staleness", "drain_grace", "engine_spare", "grammar_processes",
        "grammar_time_limit", "lookahead", "max_num_batched_tokens", "max_waiting", "otlp_service_name",
        "recorded_prompt_rows", "scale_down_delay", "scale_up_delay", "stream_stall_timeout", "threads",
        "trace_follow_caller", "usage_journal_size",
    }
)  # fmt: skip
"""Settings whose default hardly anyone changes: `--help` leaves them out, `--help-all` shows them."""


def is_hidden(name: str) -> bool:
    """Whether `--help` leaves the option out."""
    return name in EXPERT
