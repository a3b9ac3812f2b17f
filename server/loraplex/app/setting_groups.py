"""How help and documents order the settings, and which of them hardly anyone sets."""

from __future__ import annotations

GROUPS: dict[str, tuple[str, ...]] = {
    "First": (
        "model", "served_model_name", "host", "port", "admin_host", "admin_port", "admin_token", "data_dir", "device",
        "dtype", "max_model_len", "max_num_seqs", "kv_cache_memory", "adapter_memory", "max_adapter_rank", "log_level",
    ),
    "Model": (
        "quantise", "kv_cache_dtype", "kv_host_memory", "kv_disk", "state_cache", "batch_invariant", "speculation",
        "kernels", "attention", "threads", "tokenizer", "tool_format", "reasoning_format", "default_max_tokens",
        "max_num_batched_tokens", "max_step_ms", "max_waiting",
    ),
    "Adapters": (
        "adapter_cpu_memory", "max_adapter_upload", "adapter_sources", "adapter_templates", "adapter_towers",
        "keep_versions", "artifact_url", "artifact_cache_size",
    ),
    "Limits": ("server_limit", "redis_url", "limits_when_apart", "max_body"),
    "Storage": ("database_url", "database_staleness", "key_pepper", "usage_keep_days", "usage_journal_size"),
    "Ports": (
        "public_url", "cors_origins", "metrics_on_data_port", "residency_metrics", "drain_grace", "drain_timeout",
    ),
    "Engines": (
        "replicas", "max_replicas", "ray_address", "engine_port", "engine_token_file", "engine_tls", "engine_spare",
    ),
    "Telemetry": (
        "otlp_endpoint", "trace_sample_ratio", "webhook_url", "webhook_secret", "webhook_allow",
    ),
}  # fmt: skip
"""Names of settings in the order of `--help`, by its panels: those that operators touch first come first."""
ENGINE_SETTINGS = (
    "model", "served_model_name", "device", "dtype", "quantise", "max_model_len", "kernels", "attention",
    "batch_invariant", "speculation", "threads", "engine_spare", "kv_cache_memory", "kv_cache_dtype",
    "kv_host_memory", "kv_disk", "state_cache",
    "adapter_memory", "adapter_cpu_memory", "max_num_seqs", "max_num_batched_tokens", "max_step_ms", "max_waiting",
    "max_adapter_rank", "data_dir", "artifact_url", "artifact_cache_size", "engine_token_file", "engine_tls",
    "drain_timeout", "log_level",
)  # fmt: skip
"""Settings of an engine, which `loraplex engine` takes too."""
EXPERT = frozenset(
    {
        "artifact_cache_size", "attention", "database_staleness", "drain_grace", "engine_spare",
        "max_num_batched_tokens", "max_waiting", "threads", "usage_journal_size",
    }
)  # fmt: skip
"""Settings whose default hardly anyone changes: `--help` leaves them out, `--help-all` shows them."""
