"""Every figure, once: name, kind, labels and exact meaning, what good looks like and what to do when it does not.

HELP lines of `/metrics`, `LLM.get_metrics()` and the table in docs/operations.md follow from these rows.
"""

from typing import Literal

import msgspec

from jaxpaged.counts import counted

type Kind = Literal["counter", "gauge", "histogram"]


class Definition(msgspec.Struct, frozen=True):
    """One figure.

    Attributes:
        name: as Prometheus shows it; counters end in `_total`.
        kind: a counter only grows, a gauge is the present value, a histogram counts values in classes.
        doc: the HELP line: what is counted, in which unit, from when to when.
        good: what it looks like when all is well.
        act: what to do otherwise.
        labels: names of its labels; their values come from us, never from a client.
        vllm: vLLM's name for it, if there is one.
    """

    name: str
    kind: Kind
    doc: str
    good: str
    act: str = ""
    labels: tuple[str, ...] = ()
    vllm: str = ""


def _gauge(name: str, doc: str, good: str, act: str = "", *labels: str, vllm: str = "") -> Definition:
    return Definition(f"jaxpaged_{name}", "gauge", doc, good, act, labels, vllm)


def _counter(name: str, doc: str, good: str, act: str = "", *labels: str, vllm: str = "") -> Definition:
    return Definition(f"jaxpaged_{name}_total", "counter", doc, good, act, labels, vllm)


def _histogram(name: str, doc: str, good: str, act: str = "", *labels: str, vllm: str = "") -> Definition:
    return Definition(f"jaxpaged_{name}", "histogram", doc, good, act, labels, vllm)


ENGINE_GAUGES = (
    _gauge(
        "num_requests_running",
        "Sequences that own pages, after the last step; the article's num_running_requests",
        "follows the load, below max_num_seqs",
        "`too_few_requests` when low beside a queue of clients; `row_limit` when stuck at max_num_seqs",
        vllm="num_requests_running",
    ),
    _gauge(
        "num_requests_waiting",
        "Requests that are queued and own no pages",
        "near 0",
        "`row_limit`, `pool_full`, `overloaded`",
        vllm="num_requests_waiting",
    ),
    _gauge(
        "kv_cache_usage_ratio",
        "Share of the page pool that running sequences own, 0 to 1; the article's gpu_cache_usage",
        "0.6 to 0.95 under load",
        "`pool_full` above, `too_few_requests` below",
        vllm="kv_cache_usage_perc",
    ),
    _gauge(
        "kv_pages",
        "Pages of the pool: in_use by running sequences, cached for their prefixes and free to be taken, free",
        "cached pages are no waste: they are given out when needed",
        "",
        "state",
    ),
    _gauge("batch_sequences", "Sequences of the last step; the article's batch_size", "near num_requests_running", "`batch_jitter`"),
    _gauge("batch_tokens", "Tokens of the last step, without padding", "near the bucket it runs in", "`batch_too_small`"),
    _gauge("padding_ratio", "Share of the last step's computed places that were padding, 0 to 1", "below 0.3", "`padding_waste`"),
    _gauge("engine_is_paused", "1 while an operator has paused the engine, or it drains or sleeps, else 0", "0"),
    _gauge("engine_is_sleeping", "1 while the engine sleeps, else 0", "0"),
    _gauge("num_engines", "Copies of the model (data of the mesh); the limits and sizes below are those of one", "as configured"),
    _gauge("max_num_seqs", "Sequences per step at most (scheduler.max_num_seqs)", "as configured"),
    _gauge("max_num_batched_tokens", "Tokens per step at most (scheduler.max_num_batched_tokens)", "as configured"),
    _gauge("max_model_len", "Tokens of prompt and answer together at most", "as configured"),
    _gauge("kv_pool_bytes", "Size of the page pool in bytes", "as configured"),
    _gauge("kv_page_tokens", "Tokens per page (cache.page_size)", "as configured"),
    _gauge("weight_bytes", "Size of the weights in bytes", "as the model is"),
    _gauge(
        "engine_info",
        "Always 1; the labels say what is served, and on what",
        "1",
        "`slow_path`",
        "model",
        "dtype",
        "platform",
        "attention",
        "quantization",
    ),
)

ENGINE_COUNTERS = (
    _counter("steps", "Steps that were finished", "grows while anything runs", "`stuck` when it does not"),
    _counter(
        "step_seconds",
        "Seconds of steps by part: schedule, pack, device (waiting for the device), update, detokenize; with overlapped steps the host's "
        "parts pass while the device works",
        "device has most of it",
        "`host_bound` when it has not",
        "part",
    ),
    _counter("computed_tokens", "Tokens that steps computed, without padding", "grows"),
    _counter("padding_tokens", "Places of steps that held no token", "below 30 % of all places", "`padding_waste`"),
    _counter("prefill_tokens", "Tokens of prompts that steps computed, those computed again included", "what is new in prompts"),
    _counter("decode_tokens", "Tokens that steps computed to get the next one of an answer", "grows"),
    _counter("prompt_tokens", "Tokens of the prompts of requests that ended, cached ones included", "grows", vllm="prompt_tokens"),
    _counter(
        "prompt_tokens_cached",
        "Tokens of the prompts of requests that ended, which were found in the prefix cache",
        "high where prompts begin alike",
        vllm="prompt_tokens_cached",
    ),
    _counter("generation_tokens", "Tokens of answers, as steps bring them", "grows", vllm="generation_tokens"),
    _counter(
        "prefix_cache_queries",
        "Tokens of prompts that were looked up in the prefix cache, at first admissions",
        "grows",
        vllm="prefix_cache_queries",
    ),
    _counter("prefix_cache_hits", "Tokens of prompts that were found there", "high where prompts begin alike", vllm="prefix_cache_hits"),
    _counter("preemptions", "Times that a running sequence lost its pages", "0", "`pool_full`", vllm="num_preemptions"),
    _counter("preempted_tokens", "Computed tokens that preempted sequences had", "0", "`pool_full`"),
    _counter("prefill_recompute_tokens", "Tokens computed again after a preemption", "0", "`pool_full`"),
    _counter(
        "admission_decisions",
        "Steps at which somebody waited, by what kept the next one out: none (all came in), rows, tokens, pages, target_itl_s, "
        "preemption, draining, a token on its way, or its beginning is being computed",
        "none",
        "`row_limit` for rows, `pool_full` for pages",
        "reason",
    ),
    _counter("requests_received", "Requests at the engine's door", "rejected + queued"),
    _counter("requests_rejected", "Requests turned away at the door, by error code", "few", "docs/api.md explains the codes", "reason"),
    _counter("requests_queued", "Requests let into the queue", "finished + those that run or wait"),
    _counter(
        "requests_finished",
        "Requests that ended, by reason: stop, length, abort, error",
        "stop and length",
        "many aborts: clients give up; errors: the log has the message",
        "reason",
        vllm="request_success",
    ),
    _counter(
        "programs_compiled",
        "Step programs made ready, by when: start, after_ready",
        "after_ready is 0",
        "`compiling` when it is not: please report it",
        "when",
    ),
    _counter("compile_after_ready_seconds", "Seconds spent on programs after the engine was ready", "0", "`compiling`"),
    _counter("events_lost", "Events that a log could not keep up with or write, by log", "0", "a full disk, or a slow terminal", "sink"),
    _counter("metric_faults", "Values that would have made a counter fall; they were left out", "0", "please report it"),
)

REQUEST_HISTOGRAMS = (
    _histogram(
        "time_to_first_token_seconds",
        "Seconds from a request's arrival to its first token, once per request",
        "P95 under your target; 0.2 s feels instant",
        "`prefill_blocks_decode`, `row_limit`, `pool_full`",
        vllm="time_to_first_token_seconds",
    ),
    _histogram(
        "token_gap_seconds",
        "Seconds between two tokens of an answer",
        "P99 near the median",
        "`prefill_blocks_decode`, `batch_jitter`",
        vllm="inter_token_latency_seconds",
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "Seconds per token of an answer after its first, one mean per request",
        "your readers' speed or better",
        "`device_bound`",
        vllm="request_time_per_output_token_seconds",
    ),
    _histogram(
        "request_seconds",
        "Seconds from a request's arrival to its end",
        "what its tokens need",
        vllm="e2e_request_latency_seconds",
    ),
    _histogram(
        "queue_seconds",
        "Seconds from a request's arrival to its first step, or to its end if it had none",
        "near 0",
        "`row_limit`, `pool_full`",
        vllm="request_queue_time_seconds",
    ),
    _histogram(
        "prefill_seconds",
        "Seconds from a request's first step to its first token",
        "grows with the prompt",
        "`giant_prompt`",
        vllm="request_prefill_time_seconds",
    ),
    _histogram(
        "decode_seconds", "Seconds from a request's first token to its end", "grows with the answer", vllm="request_decode_time_seconds"
    ),
    _histogram(
        "inference_seconds", "Seconds from a request's first step to its end", "as the two above", vllm="request_inference_time_seconds"
    ),
    _histogram("request_prompt_tokens", "Tokens of a request's prompt", "your traffic", "", vllm="request_prompt_tokens"),
    _histogram(
        "request_computed_prompt_tokens",
        "Tokens of a request's prompt that were not found in the prefix cache",
        "less than the prompt where prompts begin alike",
        vllm="request_prefill_kv_computed_tokens",
    ),
    _histogram("request_output_tokens", "Tokens of a request's answers together", "your traffic", vllm="request_generation_tokens"),
    _histogram(
        "request_longest_answer_tokens", "Tokens of a request's longest answer", "your traffic", vllm="request_max_num_generation_tokens"
    ),
    _histogram("request_max_tokens", "Most tokens that a queued request may get", "your traffic", vllm="request_params_max_tokens"),
    _histogram("request_answers", "Answers that a request asked for (n)", "your traffic", vllm="request_params_n"),
    _histogram(
        "step_duration_seconds",
        "Seconds of a step on the host: scheduling, packing, waiting for the device, taking in",
        "steady",
        "`batch_jitter`, `device_bound`",
    ),
    _histogram("step_tokens", "Tokens of a step, without padding", "steady", "`batch_too_small`", vllm="iteration_tokens_total"),
    _histogram("step_sequences", "Sequences of a step", "steady", "`batch_jitter`"),
    _histogram(
        "http_seconds",
        "Seconds from the arrival of a request for an answer over HTTP to the end of sending it",
        "near request_seconds",
        "`slow_clients`",
    ),
)

HTTP_COUNTERS = (
    _counter("http_answers", "Requests over HTTP by route and status", "200", "", "path", "status"),
    _counter(
        "http_ends",
        "Requests for an answer by their end: stop, length, rejected (4xx), refused (429, 503), aborted (the client left), failed",
        "stop and length",
        "refused: `overloaded`; aborted: `slow_clients`",
        "end",
    ),
    _counter("http_errors", "Errors that were told to clients, by code", "few", "docs/api.md explains the codes", "code"),
    _counter(
        "http_merged_tokens",
        "Tokens of streams that came with one before, because the event loop or the client lagged",
        "few",
        "`slow_clients`, or more streams than the processor writes",
    ),
)

MACHINE_GAUGES = (
    _gauge("scrape_time_seconds", "Seconds since 1970 at which these figures were read", "now"),
    _gauge("process_memory_bytes", "Resident memory of the process in bytes", "steady after the start", "a leak: please report it"),
    _gauge("process_peak_memory_bytes", "Most resident memory that the process has had", "below the machine's"),
    _gauge("gpu_utilization_ratio", "Share of the last second in which the GPU worked, 0 to 1", "near 1 under load", "`host_bound`", "gpu"),
    _gauge("gpu_memory_used_bytes", "Memory of the GPU that is in use, by anybody", "below the total", "", "gpu"),
    _gauge("gpu_memory_total_bytes", "Memory of the GPU", "as built", "", "gpu"),
)
"""Of the machine, not of events: read when they are asked for. Those of GPUs are absent where there is none."""

DEFINITIONS = (*ENGINE_GAUGES, *ENGINE_COUNTERS, *REQUEST_HISTOGRAMS, *HTTP_COUNTERS, *MACHINE_GAUGES)


def definitions() -> dict[str, Definition]:
    """Every figure by its name."""
    return {definition.name: definition for definition in DEFINITIONS}


def document() -> str:
    """The table of docs/operations.md. A word in code quotes under "otherwise" is a finding of `jaxpaged diagnose`."""
    lines = [
        f"{counted(len(DEFINITIONS), 'figure')}; names begin with `jaxpaged_`, those of vLLM with `vllm:`.",
        "",
        "| figure | what it is | good | otherwise | vLLM's name |",
        "|---|---|---|---|---|",
    ]
    for row in DEFINITIONS:
        labels = "{" + ", ".join(row.labels) + "}" if row.labels else ""
        name = row.name.removeprefix("jaxpaged_") + labels
        lines.append(f"| `{name}` ({row.kind}) | {row.doc} | {row.good} | {row.act} | {f'`{row.vllm}`' if row.vllm else ''} |")
    return "\n".join(lines) + "\n"
