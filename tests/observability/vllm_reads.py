"""Names that load generators look for at a server that speaks as vLLM does, as written in their sources."""


def words(*lines: str) -> list[str]:
    return " ".join(lines).split()


INFERENCE_PERF = words(
    "e2e_request_latency_seconds external_prefix_cache_hits external_prefix_cache_queries generation_tokens inter_token_latency_seconds",
    "iteration_tokens_total kv_cache_usage_perc mm_cache_hits mm_cache_queries num_preemptions num_requests_running num_requests_waiting",
    "prefix_cache_hits prefix_cache_queries prompt_tokens prompt_tokens_cached request_decode_time_seconds request_generation_tokens",
    "request_inference_time_seconds request_max_num_generation_tokens request_params_max_tokens request_params_n",
    "request_prefill_kv_computed_tokens request_prefill_time_seconds request_prompt_tokens request_queue_time_seconds request_success",
    "request_time_per_output_token_seconds time_to_first_token_seconds",
)
"""inference-perf, client/modelserver/vllm_client.py, filtered by the label model_name. Without those that vLLM itself tells only when asked
to: corrupted_requests, kv_block_lifetime_seconds, kv_block_idle_before_evict_seconds, kv_block_reuse_gap_seconds."""

AIPERF = words(
    "e2e_request_latency_seconds external_prefix_cache_hits external_prefix_cache_queries generation_tokens kv_cache_usage_perc",
    "num_preemptions num_requests_running num_requests_waiting prefix_cache_hits prefix_cache_queries prompt_tokens request_success",
    "time_to_first_token_seconds",
)
"""aiperf, without names of versions of vLLM that are gone (gpu_cache_usage_perc, cpu_cache_usage_perc) and of drafts."""

ISSUE = words(
    "num_requests_running num_requests_waiting kv_cache_usage_perc time_to_first_token_seconds inter_token_latency_seconds",
    "e2e_request_latency_seconds prompt_tokens generation_tokens num_preemptions prefix_cache_queries prefix_cache_hits request_success",
    "cache_config_info iteration_tokens_total request_queue_time_seconds request_time_per_output_token_seconds request_prompt_tokens",
    "request_generation_tokens",
)
"""What we promise: vLLM's core."""
