"""Names of vLLM 0.32.0's metrics."""

from __future__ import annotations

DASHBOARDS = frozenset(
    {
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_sum",
        "vllm:generation_tokens_total",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:inter_token_latency_seconds_count",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:iteration_tokens_total_count",
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:prompt_tokens_total",
        "vllm:request_decode_time_seconds_sum",
        "vllm:request_generation_tokens_bucket",
        "vllm:request_max_num_generation_tokens_sum",
        "vllm:request_prefill_time_seconds_sum",
        "vllm:request_prompt_tokens_bucket",
        "vllm:request_queue_time_seconds_sum",
        "vllm:request_success_total",
        "vllm:request_time_per_output_token_seconds_bucket",
        "vllm:request_time_per_output_token_seconds_count",
        "vllm:request_time_per_output_token_seconds_sum",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:time_to_first_token_seconds_count",
        "vllm:time_to_first_token_seconds_sum",
    }
)
"""What the queries of its Grafana and Perses dashboards read. All select by the label `model_name` alone."""

SERVED_ALWAYS = frozenset(
    {
        "vllm:cache_config_info",
        "vllm:e2e_request_latency_seconds",
        "vllm:engine_sleep_state",
        "vllm:external_prefix_cache_hits_total",
        "vllm:external_prefix_cache_queries_total",
        "vllm:generation_tokens_total",
        "vllm:inter_token_latency_seconds",
        "vllm:iteration_tokens_total",
        "vllm:kv_cache_usage_perc",
        "vllm:mm_cache_hits_total",
        "vllm:mm_cache_queries_total",
        "vllm:num_preemptions_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prompt_tokens_by_source_total",
        "vllm:prompt_tokens_cached_by_source_total",
        "vllm:prompt_tokens_cached_total",
        "vllm:prompt_tokens_total",
        "vllm:request_decode_time_seconds",
        "vllm:request_generation_tokens",
        "vllm:request_inference_time_seconds",
        "vllm:request_max_num_generation_tokens",
        "vllm:request_num_preemptions",
        "vllm:request_params_max_tokens",
        "vllm:request_params_n",
        "vllm:request_prefill_kv_computed_tokens",
        "vllm:request_prefill_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_queue_time_seconds",
        "vllm:request_success_total",
        "vllm:request_time_per_output_token_seconds",
        "vllm:time_to_first_token_seconds",
        "vllm:admission_rejections_total",
        "vllm:lora_requests_info",
        "vllm:tool_call_parser_invocations_total",
    }
)
"""What its engine and API serve without an option of their own, `--enable-lora` aside."""
