"""`jaxpaged bench KIND`: how fast it is: a table, and one JSON line last."""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpaged.cli_parser import Parser, integer, number
from jaxpaged.commands.answers import write_lines
from jaxpaged.commands.engine_api import MakeEngine
from jaxpaged.commands.engine_start import add_engine_arguments, make_llm, running_engine, terminal_config
from jaxpaged.errors import ConfigError
from jaxpaged.profiler import traced

if TYPE_CHECKING:
    from jaxpaged.bench.outcomes import Outcome
    from jaxpaged.bench.workloads import Job

KINDS = ("throughput", "latency", "startup", "serve", "static", "profile")
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_WORKLOAD = {"throughput": "mixed16", "serve": "mixed16", "latency": "b1"}
MAX_SHOWN_ERRORS = 5
MIN_VOCAB_SIZE = 16

FLAGS = {
    "workload": ("throughput", "latency", "serve"),
    "workload_seed": ("throughput", "latency", "serve", "static"),
    "num_prompts": ("throughput", "serve", "static"),
    "random_input_len": ("throughput", "latency", "serve"),
    "random_output_len": ("throughput", "latency", "serve"),
    "random_range_ratio": ("throughput", "latency", "serve"),
    "request_rate": ("throughput", "serve", "static"),
    "burstiness": ("throughput", "serve"),
    "max_concurrency": ("serve",),
    "vocab_size": ("serve",),
    "num_warmups": ("throughput", "latency", "serve"),
    "num_iters": ("latency", "startup"),
    "num_iters_cold": ("startup",),
    "goodput": ("throughput", "serve"),
    "metric_percentiles": ("throughput", "latency", "serve"),
    "endpoint": ("serve",),
    "api_key": ("serve",),
    "extra_body": ("serve",),
    "stop_at_eos": ("serve",),
    "static_batch": ("static",),
    "profile": ("throughput",),
}
"""Which kinds a flag means something to."""


def add_arguments(parser: Parser) -> None:
    """See `commands`. Names and meanings are those of `vllm bench` where it has the same."""
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=f"what to measure: {', '.join(KINDS)}")
    shown = f"of serve: any OpenAI server (default: {DEFAULT_URL}); of profile: a folder with a trace"
    parser.add_argument("url", nargs="?", metavar="URL", help=shown)
    work = parser.add_argument_group("workload")
    work.add_argument("--workload", "--dataset-name", metavar="NAME", help="b1, mixedN, prefixN, batchN, lognormalN or randomN")
    work.add_argument("--workload-seed", type=integer, metavar="N", help="seed of prompts, lengths and arrivals (default: 0)")
    work.add_argument("--num-prompts", type=integer, metavar="N", help="requests, instead of the number in the workload's name")
    work.add_argument("--random-input-len", "--input-len", type=integer, metavar="N", help="of random: tokens in (default: 1024)")
    work.add_argument("--random-output-len", "--output-len", type=integer, metavar="N", help="of random: tokens out (default: 128)")
    work.add_argument("--random-range-ratio", type=number, metavar="X", help="of random: both differ evenly by this share (default: 0)")
    work.add_argument("--request-rate", type=number, metavar="X", help="requests per second, at random moments (default: all at once)")
    work.add_argument("--burstiness", type=number, metavar="X", help="1: Poisson arrivals; lower: in bursts; higher: evener")
    work.add_argument("--max-concurrency", type=integer, metavar="N", help="of serve: requests open at once (default: no limit)")
    work.add_argument("--num-warmups", type=integer, metavar="N", help="requests before the clock starts (default: 1)")
    work.add_argument("--num-iters", "--num-iters-warm", type=integer, metavar="N", help="of latency, startup: runs (default: 5)")
    work.add_argument("--num-iters-cold", type=integer, metavar="N", help="of startup: runs that compile everything (default: 0)")
    work.add_argument("--static-batch", type=integer, metavar="N", help="of static: requests in a static batch (default: 16)")
    told = parser.add_argument_group("figures")
    told.add_argument("--goodput", nargs="+", metavar="NAME:MS", help="also count the requests that keep these: ttft:200 tpot:50")
    told.add_argument("--metric-percentiles", metavar="P,P", help="percentiles to tell (default: 99)")
    told.add_argument("--profile", metavar="FOLDER", help="of throughput: write a trace there, and tell where a step's time goes")
    told.add_argument("--output-json", "--save-result", metavar="FILE", help="also write the JSON line to this file")
    asked = parser.add_argument_group("requests of serve")
    asked.add_argument("--endpoint", choices=("completions", "chat"), help="completions send token ids, chat about as many words")
    asked.add_argument("--vocab-size", type=integer, metavar="N", help="token ids are under this (default: 32000)")
    asked.add_argument("--api-key", metavar="KEY", help="key of the server (also JAXPAGED_API_KEY, OPENAI_API_KEY)")
    asked.add_argument("--extra-body", metavar="JSON", help="fields for the body of every request")
    asked.add_argument("--stop-at-eos", action="store_true", default=None, help="answers may end early: ignore_eos is not sent")
    add_engine_arguments(parser)


def run(args: argparse.Namespace, make: MakeEngine = make_llm) -> int:
    """See `commands`. Status 1: 1 % of the requests failed."""
    _check_flags(args)
    kinds = {"throughput": _throughput, "latency": _latency, "startup": _startup, "serve": _serve, "static": _static, "profile": _profile}
    text, result, status = kinds[args.kind](args, make)
    line = json.dumps({"benchmark": args.kind, **result})
    write_lines(sys.stdout, [text, line])
    if args.output_json:
        Path(args.output_json).write_text(line + "\n", encoding="utf-8")
    return status


type Measured = tuple[str, dict[str, Any], int]
"""The table, the figures, and the exit status."""


def _check_flags(args: argparse.Namespace) -> None:
    """Refuses what has no meaning to this kind, instead of ignoring it."""
    for name, kinds in FLAGS.items():
        if vars(args)[name] is not None and args.kind not in kinds:
            raise ConfigError(f"--{name.replace('_', '-')} belongs to bench {' and '.join(kinds)}, not to bench {args.kind}")
    for name in ("num_prompts", "random_input_len", "random_output_len", "max_concurrency", "num_iters", "static_batch"):
        if vars(args)[name] is not None and vars(args)[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {vars(args)[name]}")
    if args.vocab_size is not None and args.vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"--vocab-size must be at least {MIN_VOCAB_SIZE}, got {args.vocab_size}")
    for name in ("num_warmups", "num_iters_cold"):
        if vars(args)[name] is not None and vars(args)[name] < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 0, got {vars(args)[name]}")
    if args.url is not None and args.kind not in ("serve", "profile"):
        raise ConfigError(f"a URL belongs to bench serve, not to bench {args.kind}")
    options = sorted(path for path in args.overrides if args.kind == "profile" or (args.kind == "serve" and path != "model.model"))
    if options:
        raise ConfigError(f"bench {args.kind} starts no engine: {args.overrides[options[0]][0]} belongs to the command that does")


def _jobs(args: argparse.Namespace, vocab_size: int) -> "list[Job]":
    """The workload that the flags ask for."""
    from jaxpaged.bench.workloads import Lengths, arriving
    from jaxpaged.bench.workloads import make as make_workload

    lengths = {"num_prompt": args.random_input_len, "num_output": args.random_output_len, "spread": args.random_range_ratio}
    given = {name: value for name, value in lengths.items() if value is not None}
    if not 0 <= given.get("spread", 0) <= 1:
        raise ConfigError(f"--random-range-ratio must be in 0 to 1, got {args.random_range_ratio}")
    name = _workload(args)
    if given and not name.startswith("random"):
        raise ConfigError(f"lengths are given for a random workload, and {name} has its own")
    seed = args.workload_seed or 0
    jobs = make_workload(name, seed=seed, vocab_size=vocab_size, lengths=Lengths(**given))
    rate = math.inf if args.request_rate is None else args.request_rate
    return arriving(jobs, rate, burstiness=1.0 if args.burstiness is None else args.burstiness, seed=seed)


def _workload(args: argparse.Namespace) -> str:
    """Its name, with the number of requests that is asked for."""
    has_lengths = any(value is not None for value in (args.random_input_len, args.random_output_len, args.random_range_ratio))
    name: str = args.workload or ("random" if has_lengths else DEFAULT_WORKLOAD[args.kind])
    if args.num_prompts is None:
        return name
    return f"{name.rstrip('0123456789') if name != 'b1' else 'batch'}{args.num_prompts}"


def _vocab_size(llm: Any) -> int:
    """Ids of the tokenizer; a model may have some more, which mean nothing."""
    return int(llm.get_tokenizer().vocab_size)


def _percentiles(args: argparse.Namespace) -> list[float]:
    words = (args.metric_percentiles or "99").split(",")
    try:
        read = [float(word) for word in words]
    except ValueError:
        read = [math.nan]
    if not all(0 <= value <= 100 for value in read):
        raise ConfigError(f"--metric-percentiles takes numbers from 0 to 100, got {args.metric_percentiles!r}")
    return read


def _summed(
    args: argparse.Namespace, outcomes: "Sequence[Outcome]", seconds: float, extra: dict[str, Any], lines: Sequence[str] = ()
) -> Measured:
    """Table, figures and status of finished requests."""
    from jaxpaged.bench.outcomes import figures, has_failed, read_goals, table

    goals = read_goals(args.goodput) if args.goodput else None
    made = figures(outcomes, seconds, percentiles=_percentiles(args), goals=goals)
    rate = math.inf if args.request_rate is None else args.request_rate
    text = table(made, rate=rate, max_concurrency=args.max_concurrency)
    errors = sorted({outcome.error for outcome in outcomes if outcome.error})
    for error in errors[:MAX_SHOWN_ERRORS]:
        sys.stderr.write(f"failed: {error}\n")
    # "inf", as vLLM writes it: JSON has no such number.
    arrivals = {"request_rate": "inf" if math.isinf(rate) else rate, "burstiness": 1.0 if args.burstiness is None else args.burstiness}
    return "\n".join([text, *lines]), {**extra, **arrivals, **made}, int(has_failed(outcomes))


def _throughput(args: argparse.Namespace, make: MakeEngine) -> Measured:
    """A workload through an engine in this process, with the share of what the machine could do."""
    import time

    from jaxpaged.bench import floor, in_process
    from jaxpaged.bench.outcomes import read_goals
    from jaxpaged.bench.workloads import Job

    _percentiles(args), read_goals(args.goodput or ())
    config, facts = terminal_config(args), in_process.StartFacts()
    with running_engine(config, lambda config, sinks: make(config, (*sinks, facts))) as running:
        engine: Any = running.llm.engine  # type: ignore[attr-defined]
        assert facts.started is not None
        jobs = _jobs(args, _vocab_size(running.llm))
        in_process.check_fits(jobs, facts.started.max_model_len)
        machine = floor.measure(facts.started.dtype, config.cpu.threads)
        for index in range(1 if args.num_warmups is None else args.num_warmups):
            first = jobs[index % len(jobs)]
            in_process.run(engine, [Job(f"warm-up {index}", first.prompt, first.num_output)])
        engine.reset_prefix_cache()
        folder = None if args.profile is None else Path(args.profile)
        with traced(folder), _bar(len(jobs)) as on_done:
            begun_s = time.perf_counter()
            outcomes = in_process.run(engine, jobs, on_done=on_done)
            seconds = time.perf_counter() - begun_s
        least_s = floor.least_seconds(in_process.work_of(facts.started, jobs), machine)
        extra: dict[str, Any] = {
            "model": facts.started.model,
            "dtype": facts.started.dtype,
            "quantization": facts.started.quantization or None,
            "workload": _workload(args),
            **in_process.throughput(outcomes, seconds),
            "memory_bytes_per_s": machine.bandwidth,
            "flops_per_s": machine.flops,
            "floor_s": least_s,
            "share_of_floor": least_s / seconds,
        }
    lines = [
        f"{'Memory bandwidth (GB/s):':<40} {machine.bandwidth / 1e9:.1f}",
        f"{f'Matrix products, {machine.dtype} (GFLOP/s):':<40} {machine.flops / 1e9:.0f}",
        f"{'Least time on this machine (s):':<40} {least_s:.2f}",
        f"{'Share of the floor:':<40} {least_s / seconds:.1%}",
    ]
    if folder is not None:
        text, extra["profile"] = _stages(folder)
        lines += ["", text]
    return _summed(args, outcomes, seconds, extra, lines)


def _latency(args: argparse.Namespace, make: MakeEngine) -> Measured:
    """The same requests again and again: how long until all of them are answered."""
    import time

    import numpy as np

    from jaxpaged.bench import in_process
    from jaxpaged.bench.workloads import Job

    percentiles = _percentiles(args)
    facts, num_runs = in_process.StartFacts(), 5 if args.num_iters is None else args.num_iters
    with running_engine(terminal_config(args), lambda config, sinks: make(config, (*sinks, facts))) as running:
        engine: Any = running.llm.engine  # type: ignore[attr-defined]
        assert facts.started is not None
        jobs, took_s = _jobs(args, _vocab_size(running.llm)), []
        in_process.check_fits(jobs, facts.started.max_model_len)
        num_warmups = 1 if args.num_warmups is None else args.num_warmups
        for index in range(num_warmups + num_runs):
            # Nothing may be left of the run before.
            engine.reset_prefix_cache()
            begun_s = time.perf_counter()
            in_process.run(engine, [Job(f"{index}-{job.name}", *job[1:]) for job in jobs])
            took_s.append(time.perf_counter() - begun_s)
    took_s = took_s[num_warmups:]
    told = {f"{percentile:g}": float(np.percentile(took_s, percentile)) for percentile in percentiles}
    lines = [f"Avg latency: {np.mean(took_s):.3f} seconds", f"Median latency: {np.median(took_s):.3f} seconds"]
    lines += [f"{name}% percentile latency: {seconds:.3f} seconds" for name, seconds in told.items()]
    result = {"model_id": facts.started.model, "avg_latency": float(np.mean(took_s)), "latencies": took_s, "percentiles": told}
    return "\n".join(lines), result, 0


def _startup(args: argparse.Namespace, make: MakeEngine) -> Measured:
    """Starts of `jaxpaged generate`, phase by phase."""
    from jaxpaged.bench import startup

    terminal_config(args)  # refused here, and not by every child
    options = [word for flag, value in args.overrides.values() for word in _as_words(flag, value)]
    if args.config:
        options += ["--config", args.config]
    num_cold, num_warm = args.num_iters_cold or 0, 5 if args.num_iters is None else args.num_iters
    parts, result = [], {}
    for title, count in (("cold", num_cold), ("warm", num_warm)):
        runs = []
        for _ in range(count):
            with tempfile.TemporaryDirectory() as folder:
                cold = ["--compilation.cache-dir", folder] if title == "cold" else []
                runs.append(startup.measure([*startup.OPTIONS, *options, *cold, "--", startup.PROMPT]))
        if runs:
            parts += [f"{title}, medians of {count}:", startup.table(runs)]
            result[title] = startup.figures(runs)
    return "\n".join(parts), result, 0


def _as_words(flag: str, value: Any) -> list[str]:
    """A flag as it was typed."""
    if isinstance(value, bool):
        return [flag]
    return [flag, *map(str, value)] if isinstance(value, list) else [f"{flag}={value}"]


def _serve(args: argparse.Namespace, make: MakeEngine) -> Measured:
    """A workload sent to a server."""
    import time

    from jaxpaged.bench import http_load
    from jaxpaged.bench.outcomes import read_goals
    from jaxpaged.bench.workloads import SERVED_VOCAB_SIZE, Job

    _percentiles(args), read_goals(args.goodput or ())
    url = (args.url or DEFAULT_URL).rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        url = f"http://{url}"
    key = args.api_key or os.environ.get("JAXPAGED_API_KEY") or os.environ.get("OPENAI_API_KEY")
    extra_body = _extra_body(args.extra_body)
    jobs = _jobs(args, args.vocab_size or SERVED_VOCAB_SIZE)
    model = args.overrides["model.model"][1] if "model.model" in args.overrides else http_load.find_model(url, key)
    target = http_load.Target(url, model, key, args.endpoint or "completions", ignore_eos=not args.stop_at_eos, extra_body=extra_body)
    for index in range(1 if args.num_warmups is None else args.num_warmups):
        (outcome,) = http_load.run(target, [Job(f"warm-up {index}", jobs[0].prompt, jobs[0].num_output)])
        if outcome.error:
            raise ConfigError(f"the first request failed: {outcome.error}")
    begun_s = time.perf_counter()
    with _bar(len(jobs)) as on_done:
        outcomes = http_load.run(target, jobs, max_concurrency=args.max_concurrency, on_done=on_done)
    seconds = time.perf_counter() - begun_s
    # The server's hardware is not ours to measure.
    extra = {
        **http_load.told_setup(target, time.localtime()),
        "num_prompts": len(jobs),
        "max_concurrency": args.max_concurrency,
        "share_of_floor": None,
    }
    return _summed(args, outcomes, seconds, extra)


def _extra_body(text: str | None) -> dict[str, Any]:
    try:
        read = json.loads(text or "{}")
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise ConfigError(f"--extra-body takes a JSON object, got {str(text)[:80]!r}")
    return read


def _static(args: argparse.Namespace, make: MakeEngine) -> Measured:
    """Static against continuous batching."""
    from jaxpaged.bench.static_batches import compare, ratio, table

    others = sorted(set(args.overrides) - {"model.model"})
    if others:
        raise ConfigError(f"bench static sets its engines up itself and takes no {args.overrides[others[0]][0]}")
    rows = compare(
        terminal_config(args).model.model,
        args.num_prompts or 64,
        rate=args.request_rate,
        seed=args.workload_seed or 0,
        static_batch=args.static_batch or 16,
    )
    text = f"{table(rows)}\n\ncontinuous / static: {ratio(rows):.2f}x the tokens/s"
    return text, {"rows": rows, "ratio": ratio(rows)}, 0


def _profile(args: argparse.Namespace, make: MakeEngine) -> Measured:
    """Where the time of a trace went that was made before."""
    if args.url is None:
        raise ConfigError("bench profile takes the folder that a trace was written to")
    text, result = _stages(Path(args.url))
    return text, result, 0


def _stages(folder: Path) -> tuple[str, dict[str, Any]]:
    """Table and figures of the newest trace below a folder."""
    from jaxpaged.trace import stage_times

    times = stage_times.read_stage_times(folder)
    return stage_times.table(times), stage_times.figures(times)


class _bar:
    """A progress bar on a terminal while requests end: gives what to call with each."""

    def __init__(self, total: int) -> None:
        from jaxpaged.progress_bar import progress_bar

        self._draw = progress_bar(total)

    def __enter__(self) -> "Callable[[Outcome], None]":
        import time

        begun_s, seen = time.perf_counter(), [0, 0]

        def on_done(outcome: "Outcome") -> None:
            seen[0] += 1
            seen[1] += outcome.num_output
            if self._draw is not None:
                self._draw(seen[0], seen[1] / (time.perf_counter() - begun_s))

        return on_done

    def __exit__(self, *_: object) -> None:
        if self._draw is not None:
            self._draw(None, 0.0)
