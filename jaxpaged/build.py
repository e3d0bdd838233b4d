"""Building an engine on the device, once its files are there: load, pool, compile, ready; each phase is an event."""

import functools
import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxpaged import events
from jaxpaged.admission_limits import reserve_pages_of
from jaxpaged.config import Config
from jaxpaged.distributed.company import Company
from jaxpaged.distributed.follower import Follower
from jaxpaged.distributed.jax_processes import start_jax
from jaxpaged.distributed.leader import Leader
from jaxpaged.distributed.runners import LeadingRunner
from jaxpaged.engine import Engine
from jaxpaged.errors import ConfigError
from jaxpaged.fit_check import FitCheck, room_here
from jaxpaged.host_limits import available_cpus
from jaxpaged.intake import Intake, default_params_of
from jaxpaged.kernel_choice import asked_kernels, check_attention
from jaxpaged.kv_cache import cache_shape, count_pages, device_memory
from jaxpaged.kv_groups import PageArithmetic
from jaxpaged.kv_layout import lay_out
from jaxpaged.load_progress import LoadProgress
from jaxpaged.loading.cache_folder import cache_home
from jaxpaged.loading.disk import bound_folder
from jaxpaged.loading.sentence_transformer import refuse_other_pooling
from jaxpaged.loading.sources import ModelFiles
from jaxpaged.memory_errors import memory_budget
from jaxpaged.model_loader import DescribedModel, make_replica
from jaxpaged.model_runner import ModelRunner, Runner
from jaxpaged.model_source import ModelSource
from jaxpaged.model_structure import ModelFacts
from jaxpaged.parallel.cuts import replica_shape
from jaxpaged.parallel.mesh_config import MeshShape, ModelCounts, check_mesh, read_mesh
from jaxpaged.parallel.replica import Replica
from jaxpaged.parameter_sizes import weight_bytes
from jaxpaged.programs import Compiled, use_persistent_cache
from jaxpaged.replicas import LoadSums, Replicas
from jaxpaged.request import MAX_EOS_IDS
from jaxpaged.settings import StepLimits, decide_limits
from jaxpaged.start import StartReport
from jaxpaged.tokenizer import Tokenizer
from jaxpaged.traced_programs import TracedPrograms
from pallas_kernels import native

MAX_KEPT_PROGRAM_BYTES = 2**30
"""Of programs in the cache folder, those as they were traced included; one takes about a third of a megabyte."""


class _BuiltModel(NamedTuple):
    """A model on its devices, a runner for each copy, and what an engine needs to know of it."""

    runners: Sequence[ModelRunner]
    facts: ModelFacts
    tokenizer: Tokenizer
    generation_config: dict[str, Any]
    eos_token_ids: frozenset[int]
    is_encoder: bool
    num_programs: int
    num_weight_bytes: int


def build_engine(config: Config, files: ModelFiles, report: StartReport, leader: Leader | None = None) -> tuple[Engine, Intake]:
    """A ready engine and its door; nothing is left behind when it fails.

    Args:
        leader: of the other processes that share the model; None: there are none.

    Raises:
        JaxpagedError: what is wrong with the options, the model or the memory, in one sentence.
    """
    emit, clocks = report.emit, report.clocks
    model = _build_model(config, files, report, leader)
    runner, tokenizer, facts = model.runners[0], model.tokenizer, model.facts
    intake = Intake(
        tokenizer,
        generation_config=model.generation_config,
        eos_token_ids=model.eos_token_ids,
        vocab=facts.vocab,
        seed=secrets.randbits(63) if config.model.seed is None else config.model.seed,
        max_logprobs=config.sampling.max_logprobs,
        max_model_len=runner.limits.max_model_len,
        is_encoder=model.is_encoder,
    )

    def make_engine(runner: Runner, sink: events.Sink) -> Engine:
        return Engine(
            runner,
            tokenizer,
            # Keys and values of an encoder depend on the whole text.
            enable_prefix_caching=config.cache.enable_prefix_caching and not model.is_encoder,
            takes_whole_prompts=model.is_encoder,
            max_in_flight=2 if config.scheduler.async_scheduling else 1,
            policy=config.scheduler,
            sink=sink,
            clocks=clocks,
        )

    if leader is not None:
        leader.serve()
        engine = make_engine(LeadingRunner(runner, leader), emit)
    elif len(model.runners) == 1:
        engine = make_engine(runner, emit)
    else:
        sums = LoadSums(emit)
        engine = Replicas([make_engine(own, sums.sink_of(number)) for number, own in enumerate(model.runners)], sums, emit)
    told = runner.told_kernels
    emit(
        events.EngineStarted(
            time_s=clocks.wall(),
            model=files.name,
            dtype=facts.dtype_name,
            num_pages=runner.num_pages,
            page_size=runner.page_size,
            pool_bytes=runner.pool_bytes,
            weight_bytes=model.num_weight_bytes,
            max_model_len=runner.limits.max_model_len,
            max_num_seqs=runner.limits.max_num_seqs,
            max_num_batched_tokens=runner.limits.max_num_batched_tokens,
            seconds=clocks.monotonic() - report.begun_s,
            num_programs=model.num_programs,
            platform=jax.default_backend(),
            quantization=facts.quantization or "",
            attention=told.attention,
            kernels=told.kernels,
            kernels_refused=told.refused,
            num_engines=len(model.runners),
        )
    )
    emit(events.HealthChanged(time_s=clocks.wall(), state="ready"))
    return engine, intake


def build_follower(config: Config, files: ModelFiles, report: StartReport, follower: Follower) -> ModelRunner:
    """The runner of a process that replays what process 0 does. Raises as `build_engine` does."""
    model = _build_model(config, files, report, follower)
    message = f"process {follower.processes.index} of {follower.processes.number} follows process 0"
    report.emit(events.HealthChanged(time_s=report.clocks.wall(), state="ready", message=message))
    return model.runners[0]


def _build_model(config: Config, files: ModelFiles, report: StartReport, company: Company | None) -> _BuiltModel:
    emit, clocks, phase = report.emit, report.clocks, report.phase
    if company is not None:
        phase("load", "waiting for JAX's processes")
        start_jax(company)
    is_gpu = jax.default_backend() == "gpu"
    mesh = read_mesh(config.parallel)
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
    check_mesh(mesh, ModelCounts(facts.heads, facts.experts), len(jax.devices()))
    if company is not None:
        _check_company_mesh(mesh, company, len(jax.devices()))
    limits = decide_limits(config, is_gpu=is_gpu, model_max_len=facts.max_positions)
    if description.is_encoder:
        refuse_other_pooling(files.path)
        _check_whole_prompts(limits)
    if facts.quantization is not None and mesh.num_devices > 1:
        raise ConfigError(
            f"quantization {facts.quantization!r} is served on one device so far, not over a mesh of {mesh.num_devices}; leave one of them "
            "out",
            param="model.quantization",
        )
    replicas = _replicas(source.described, mesh)
    _check_pool(config, facts, limits, replicas[0])
    kernels = asked_kernels(config.kernels)
    check_attention(kernels, facts, cache_shape(facts, config.cache), len(lay_out(facts.windows).groups))
    room = room_here()
    if room is not None:
        FitCheck(config, description, room).require(mesh)
    source.read_ahead()
    if facts.quantization is not None and (missing := native.library().missing) is not None:
        phase("load", f"CPU kernels are absent, XLA does their work: {missing}")
    phase("load", f"loading the tokenizer of {files.name}")
    tokenizer = Tokenizer.from_files(
        files,
        chat_template=config.model.chat_template,
        template_timeout_s=config.model.template_timeout_s,
        may_be_missing=config.model.load_format == "dummy",
    )
    eos_token_ids = frozenset((*description.eos_token_ids, *tokenizer.eos_token_ids))
    if len(eos_token_ids) > MAX_EOS_IDS:
        raise ConfigError(f"the model names {len(eos_token_ids)} end tokens, and at most {MAX_EOS_IDS} are supported")
    num_programs = len(limits.token_buckets) * len(replicas)
    num_from_cache = num_done = num_weight_bytes = 0

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

    def on_warmed(done: int, total: int) -> None:
        if company is not None and done == 0:
            # The first step waits for all processes, on their devices, where nobody sees who is late.
            phase("warm_up", "waiting for the programs of the other processes")
            same = repr((description.hf_config, facts, limits, tokenizer.vocab_size)).encode()
            company.same("model and limits", hashlib.sha256(same).hexdigest())
        phase("warm_up", f"first steps {done}/{total}", done, total)

    def make_runner(replica: Replica | None) -> ModelRunner:
        nonlocal num_weight_bytes
        phase("load", f"loading the weights of {files.name}")
        loading = LoadProgress(files.name, functools.partial(phase, "load"))
        # What is read of weights that are then quantized is more than what is kept.
        num_bytes = weight_bytes(description.sizes, {}) if facts.quantization is None else None
        with memory_budget():
            model = source.load(replica, on_bytes=loading.meter(num_bytes).advance, is_last=replica is replicas[-1])
        num_weight_bytes += model.weight_bytes
        phase("pool", "allocating the page pool")
        with memory_budget():
            return ModelRunner(
                model,
                limits=limits,
                cache=config.cache,
                num_ids=min(tokenizer.vocab_size, facts.vocab),
                max_parallel=config.compilation.max_parallel or num_threads,
                logprobs_mode=config.sampling.logprobs_mode,
                traced=TracedPrograms(programs_folder and programs_folder / "traced"),
                kernels=kernels,
                load_again=functools.partial(source.load, replica),
                fits_context=config.model.max_model_len == "auto",
                on_compiled=on_compiled,
                on_warmed=on_warmed,
                agree_pages=int if company is None else functools.partial(company.least, "pages"),
                before_compiling=lambda _: phase("compile", f"compiling {num_done}/{num_programs}", num_done, num_programs),
            )

    runners: list[ModelRunner] = []
    try:
        for replica in replicas:
            runners.append(make_runner(replica))
    except BaseException:
        for made in runners:
            made.close()
        raise
    return _BuiltModel(
        runners,
        facts,
        tokenizer,
        generation_config,
        eos_token_ids,
        description.is_encoder,
        num_programs,
        num_weight_bytes,
    )


def _replicas(described: DescribedModel, mesh: MeshShape) -> list[Replica | None]:
    """The devices of each copy of the model; None: one device, without a mesh."""
    if mesh.num_devices == 1:
        return [None]
    devices, size = jax.devices(), mesh.devices_per_replica
    shape = replica_shape(mesh, described.facts.kv_heads)
    return [make_replica(described, shape, devices[number * size : (number + 1) * size]) for number in range(mesh.data)]


def _check_company_mesh(mesh: MeshShape, company: Company, num_devices: int) -> None:
    """Raises ConfigError for a mesh that leaves a process without work, or process 0 without the ids of a copy."""
    number = company.processes.number
    if mesh.data > 1:
        raise ConfigError(
            f"the mesh axis data is {mesh.data}, and copies of a model are served by one process, not by {number}; start a server for "
            "each copy",
            param="parallel.mesh",
        )
    if mesh.num_devices != num_devices:
        raise ConfigError(
            f"the mesh has {mesh.num_devices} devices and the {number} processes have {num_devices}: it must have them all",
            param="parallel.tensor_parallel_size" if mesh.expert == 1 else "parallel.mesh",
        )


def _check_whole_prompts(limits: StepLimits) -> None:
    """Raises ConfigError when a prompt may be longer than a step of an encoder, which computes it at once."""
    if limits.max_num_batched_tokens < limits.max_model_len - 1:
        raise ConfigError(
            f"an encoder computes a prompt in one step, and max_num_batched_tokens {limits.max_num_batched_tokens} is less than the "
            f"{limits.max_model_len - 1} tokens that a prompt may have: raise it, or lower max_model_len",
            param="scheduler.max_num_batched_tokens",
        )


def _check_pool(config: Config, model: ModelFacts, limits: StepLimits, replica: Replica | None) -> None:
    """Refuses a pool that can hold nothing, or a reserve that leaves nothing of it, where its size is known before the weights are there.

    Raises:
        JaxpagedError: see `count_pages` and `reserve_pages_of`.
    """
    if config.cache.memory is None and device_memory(jax.local_devices()[:1]) is not None:
        return
    arithmetic = PageArithmetic(lay_out(model.windows).groups, config.cache.page_size)
    num_pages = count_pages(
        config.cache,
        cache_shape(model, config.cache, num_parts=replica.shape.pool_parts if replica else 1),
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
