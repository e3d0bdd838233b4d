"""Building an engine on the device, once its files are there: load, pool, compile, ready; each phase is an event."""

import secrets
from pathlib import Path

import jax

from jaxpaged import events
from jaxpaged.admission_limits import reserve_pages_of
from jaxpaged.config import Config
from jaxpaged.engine import Engine
from jaxpaged.errors import ConfigError
from jaxpaged.host_limits import available_cpus
from jaxpaged.intake import Intake, default_params_of
from jaxpaged.kv_cache import cache_shape, count_pages, device_memory
from jaxpaged.kv_groups import PageArithmetic
from jaxpaged.kv_layout import lay_out
from jaxpaged.loading.cache_folder import cache_home
from jaxpaged.loading.disk import bound_folder
from jaxpaged.loading.sentence_transformer import refuse_other_pooling
from jaxpaged.loading.sources import ModelFiles
from jaxpaged.memory_errors import memory_budget
from jaxpaged.model_runner import ModelRunner
from jaxpaged.model_source import ModelSource
from jaxpaged.model_structure import ModelFacts
from jaxpaged.programs import Compiled, use_persistent_cache
from jaxpaged.request import MAX_EOS_IDS
from jaxpaged.settings import StepLimits, decide_limits
from jaxpaged.start import StartReport
from jaxpaged.tokenizer import Tokenizer
from jaxpaged.traced_programs import TracedPrograms
from pallas_kernels import native

MAX_KEPT_PROGRAM_BYTES = 2**30
"""Of programs in the cache folder, those as they were traced included; one takes about a third of a megabyte."""


def build_engine(config: Config, files: ModelFiles, report: StartReport) -> tuple[Engine, Intake]:
    """A ready engine and its door; nothing is left behind when it fails.

    Raises:
        JaxpagedError: what is wrong with the options, the model or the memory, in one sentence.
    """
    emit, clocks, phase = report.emit, report.clocks, report.phase
    is_gpu = jax.default_backend() == "gpu"
    num_threads = config.cpu.threads or available_cpus()
    programs_folder = _programs_folder(config)
    if programs_folder is not None and config.compilation.cache_dir is None:
        # Our own folder only: one that the user names may hold what is not ours.
        bound_folder(programs_folder, MAX_KEPT_PROGRAM_BYTES)
    use_persistent_cache(programs_folder)
    phase("load", f"loading {files.name}")
    source = ModelSource(files, config.model, is_gpu=is_gpu, num_threads=num_threads)
    facts, description = source.described.facts, source.described.description
    generation_config = description.generation_config if config.model.generation_config == "auto" else {}
    default_params_of(generation_config)  # a bad file is refused before the weights are read
    limits = decide_limits(config, is_gpu=is_gpu, model_max_len=facts.max_positions)
    if description.is_encoder:
        refuse_other_pooling(files.path)
        _check_whole_prompts(limits)
    _check_pool(config, facts, limits)
    source.read_ahead()
    if facts.quantization is not None and (missing := native.library().missing) is not None:
        phase("load", f"CPU kernels are absent, XLA does their work: {missing}")
    tokenizer = Tokenizer.from_files(
        files,
        chat_template=config.model.chat_template,
        template_timeout_s=config.model.template_timeout_s,
        may_be_missing=config.model.load_format == "dummy",
    )
    eos_token_ids = frozenset((*description.eos_token_ids, *tokenizer.eos_token_ids))
    if len(eos_token_ids) > MAX_EOS_IDS:
        raise ConfigError(f"the model names {len(eos_token_ids)} end tokens, and at most {MAX_EOS_IDS} are supported")
    with memory_budget():
        model = source.load()
    num_programs = len(limits.token_buckets)
    num_from_cache = num_done = 0

    def on_compiled(program: Compiled) -> None:
        nonlocal num_from_cache, num_done
        num_done += 1
        num_from_cache += program.from_cache
        emit(
            events.ProgramCompiled(
                time_s=clocks.wall(), bucket_tokens=program.layout.num_tokens, seconds=program.seconds, from_cache=program.from_cache
            )
        )
        phase("compile", f"compiling {num_done}/{num_programs} ({num_from_cache} from cache)", num_done, num_programs)

    phase("pool", "allocating the page pool")
    with memory_budget():
        runner = ModelRunner(
            model,
            limits=limits,
            cache=config.cache,
            num_ids=min(tokenizer.vocab_size, facts.vocab),
            max_parallel=config.compilation.max_parallel or num_threads,
            logprobs_mode=config.sampling.logprobs_mode,
            traced=TracedPrograms(programs_folder and programs_folder / "traced"),
            load_again=source.load,
            fits_context=config.model.max_model_len == "auto",
            on_compiled=on_compiled,
            before_compiling=lambda _: phase("compile", f"compiling 0/{num_programs}", 0, num_programs),
        )
    intake = Intake(
        tokenizer,
        generation_config=generation_config,
        eos_token_ids=eos_token_ids,
        vocab=facts.vocab,
        seed=secrets.randbits(63) if config.model.seed is None else config.model.seed,
        max_logprobs=config.sampling.max_logprobs,
        max_model_len=runner.limits.max_model_len,
        is_encoder=description.is_encoder,
    )
    engine = Engine(
        runner,
        tokenizer,
        # Keys and values of an encoder depend on the whole text.
        enable_prefix_caching=config.cache.enable_prefix_caching and not description.is_encoder,
        takes_whole_prompts=description.is_encoder,
        max_in_flight=2 if config.scheduler.async_scheduling else 1,
        policy=config.scheduler,
        sink=emit,
        clocks=clocks,
    )
    emit(
        events.EngineStarted(
            time_s=clocks.wall(),
            model=files.name,
            dtype=facts.dtype_name,
            num_pages=runner.num_pages,
            page_size=runner.page_size,
            pool_bytes=runner.pool_bytes,
            weight_bytes=model.weight_bytes,
            max_model_len=runner.limits.max_model_len,
            max_num_seqs=runner.limits.max_num_seqs,
            max_num_batched_tokens=runner.limits.max_num_batched_tokens,
            seconds=clocks.monotonic() - report.begun_s,
            num_programs=num_programs,
            platform=jax.default_backend(),
            quantization=facts.quantization or "",
        )
    )
    emit(events.HealthChanged(time_s=clocks.wall(), state="ready"))
    return engine, intake


def _check_whole_prompts(limits: StepLimits) -> None:
    """Raises ConfigError when a prompt may be longer than a step of an encoder, which computes it at once."""
    if limits.max_num_batched_tokens < limits.max_model_len - 1:
        raise ConfigError(
            f"an encoder computes a prompt in one step, and max_num_batched_tokens {limits.max_num_batched_tokens} is less than the "
            f"{limits.max_model_len - 1} tokens that a prompt may have: raise it, or lower max_model_len",
            param="scheduler.max_num_batched_tokens",
        )


def _check_pool(config: Config, model: ModelFacts, limits: StepLimits) -> None:
    """Refuses a pool that can hold nothing, or a reserve that leaves nothing of it, where its size is known before the weights are there.

    Raises:
        JaxpagedError: see `count_pages` and `reserve_pages_of`.
    """
    if config.cache.memory is None and device_memory(jax.devices()[0]) is not None:
        return
    arithmetic = PageArithmetic(lay_out(model.windows).groups, config.cache.page_size)
    num_pages = count_pages(
        config.cache,
        cache_shape(model, config.cache),
        least_pages=arithmetic.peak_pages(1),
        most_pages=limits.most_pages(arithmetic),
        device=None,
        temporary_bytes=0,
    )
    reserve_pages_of(config.scheduler, num_pages - 1)


def _programs_folder(config: Config) -> Path | None:
    wanted = config.compilation.cache_dir
    if wanted is None:
        return cache_home() / "programs"
    return Path(wanted).expanduser() if wanted else None
