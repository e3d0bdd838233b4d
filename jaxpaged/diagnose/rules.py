"""The table of what may be wrong, most urgent first: the first that holds is the verdict.

Each rule asks one question of an observation; its check says why, or None. Thresholds are options (`diagnose.*`). docs/operations.md and
its flow chart are made of this table.
"""

from collections.abc import Callable

import msgspec

from jaxpaged.config import DiagnoseConfig
from jaxpaged.diagnose.causes import (
    Cause,
    batch_jitter,
    batch_too_small,
    compiling,
    device_bound,
    giant_prompt,
    host_bound,
    overloaded,
    padding_waste,
    pool_full,
    prefill_blocks_decode,
    row_limit,
    slow_clients,
    slow_path,
    stuck,
    too_few_requests,
)
from jaxpaged.diagnose.findings import Finding, Severity
from jaxpaged.diagnose.windows import Observation

type Check = Callable[[Observation, DiagnoseConfig], Cause | None]


class Rule(msgspec.Struct, frozen=True):
    """One row.

    Attributes:
        id: its name.
        severity: critical: nobody is served; warning: slower than need be; info: could do more.
        title: what is wrong.
        question: what is asked, with the options that hold the thresholds.
        check: says why, or None.
        remedy: what to change, in words.
        expect: what comes of it.
    """

    id: str
    severity: Severity
    title: str
    question: str
    check: Check
    remedy: str
    expect: str


RULES = (
    Rule(
        "compiling",
        "critical",
        "programs are compiled while serving",
        "Was a program compiled after the engine was ready?",
        compiling,
        "set `compilation.token_buckets` so that every step has a program, and report it: it is a bug",
        "no request waits for a compiler",
    ),
    Rule(
        "stuck",
        "critical",
        "requests run and nothing moves",
        "Do requests run without any step for `diagnose.stuck_s`?",
        stuck,
        "look at the stacks that the watchdog writes to the log; lower `server.watchdog_s` so that the process is restarted sooner",
        "a process that hangs is replaced within the watchdog's time",
    ),
    Rule(
        "slow_path",
        "warning",
        "the engine runs on a slow path",
        "Is a GPU computing in float32, or attention in plain XLA?",
        slow_path,
        "set `model.dtype` to bfloat16, `kernels.paged_attention` to mosaic_gpu",
        "steps at least twice as fast with bfloat16, and less time in attention with a kernel",
    ),
    Rule(
        "slow_clients",
        "warning",
        "clients read slower than answers come",
        "Do answers take `diagnose.slow_client_s` longer over HTTP than in the engine, and twice as long?",
        slow_clients,
        "look at the clients and the proxy before the server (buffering, bandwidth); lower `server.slow_client_timeout_s`",
        "connections are free again when answers are",
    ),
    Rule(
        "pool_full",
        "warning",
        "the page pool is full, and requests lose or wait for pages",
        "Is the pool over `diagnose.pool_full`, and are requests preempted (`diagnose.preempted_share`) or kept out for want of pages?",
        pool_full,
        "raise `cache.memory`, or lower `scheduler.max_num_seqs`",
        "no preemptions, nothing computed twice, first tokens as soon as before",
    ),
    Rule(
        "row_limit",
        "warning",
        "requests wait although there is room for them",
        "Do requests wait, with `scheduler.max_num_seqs` reached and the pool under `diagnose.pool_room`?",
        row_limit,
        "raise `scheduler.max_num_seqs`",
        "more sequences share each step, and the queue shrinks",
    ),
    Rule(
        "batch_too_small",
        "warning",
        "steps are too small for the prompts that come",
        "Do requests wait for tokens of a step (`scheduler.max_num_batched_tokens` or a target), with rows and pages to spare?",
        batch_too_small,
        "raise `scheduler.max_num_batched_tokens`, or loosen `scheduler.target_itl_s`",
        "prompts are read in fewer steps, and first tokens come sooner",
    ),
    Rule(
        "overloaded",
        "warning",
        "more comes than the engine can do",
        "Do as many wait as run for `diagnose.overload_s`, without room for more, or are requests refused all that time?",
        overloaded,
        "add a replica, or set `scheduler.max_num_queued_requests` so that those that would wait too long are told at once",
        "a queue that stays short",
    ),
    Rule(
        "giant_prompt",
        "warning",
        "single giant prompts hold the others up",
        "Is a rare prompt `diagnose.giant_ratio` times the median, with first tokens or gaps that stand out (`diagnose.gap_ratio`)?",
        giant_prompt,
        "set `scheduler.target_itl_s`, or limit prompts with `model.max_model_len`",
        "answers beside it flow on, and it takes a little longer itself",
    ),
    Rule(
        "prefill_blocks_decode",
        "warning",
        "reading prompts holds answers up",
        "Are gaps `diagnose.gap_ratio` times the median and over `diagnose.gap_s`, with `diagnose.prefill_share` of tokens in prompts?",
        prefill_blocks_decode,
        "set `scheduler.target_itl_s`, or lower `scheduler.max_num_batched_tokens`",
        "even gaps between tokens; first tokens come a little later",
    ),
    Rule(
        "host_bound",
        "warning",
        "the host takes longer than the device",
        "Is `diagnose.host_share` of step time spent scheduling, packing and making text?",
        host_bound,
        "turn `scheduler.async_scheduling` on, and give the process cores of its own",
        "steps as short as the device allows",
    ),
    Rule(
        "padding_waste",
        "warning",
        "much of what is computed is padding",
        "Is `diagnose.padding_share` of all computed places padding, in steps of `diagnose.padding_tokens` and more?",
        padding_waste,
        "give `compilation.token_buckets` one that fits",
        "shorter steps at the same load",
    ),
    Rule(
        "batch_jitter",
        "warning",
        "the batch swings",
        "Does the number of running requests swing around its mean by `diagnose.swing_ratio`, `diagnose.swings` times?",
        batch_jitter,
        "spread requests over time where they are sent; a queue before the server (`scheduler.max_num_queued_requests`) does not help",
        "the same work with a steady batch, and so with shorter first tokens",
    ),
    Rule(
        "device_bound",
        "warning",
        "the device is at its limit",
        "Is `diagnose.device_share` of step time the device's, with gaps over `diagnose.gap_s` in a busy engine?",
        device_bound,
        "a smaller model or one of fewer bits, a faster device, or a replica beside it",
        "shorter steps",
    ),
    Rule(
        "too_few_requests",
        "info",
        "the engine could do more at the same time",
        "Is the engine busy with few requests (`diagnose.rows_low`), none waiting and the pool under `diagnose.pool_low`?",
        too_few_requests,
        "send more requests at the same time",
        "several times the tokens per second at nearly the same speed for each",
    ),
)


def diagnose(observation: Observation, thresholds: DiagnoseConfig) -> list[Finding]:
    """Everything that holds, in the order of the table."""
    findings = []
    for rule in RULES:
        cause = rule.check(observation, thresholds)
        if cause is not None:
            evidence, change = cause
            since = min((item.from_time for item in evidence), default=observation.windows[0].from_s)
            findings.append(Finding(rule.id, rule.severity, rule.title, since, tuple(evidence), change, rule.expect))
    return findings
