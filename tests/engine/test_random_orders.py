"""Requests, samples, aborts, pauses and resets in any order: nothing is lost, and every answer is that of a quiet engine."""

import random
from typing import NamedTuple

import pytest

from jaxpaged.request import FinishReason, RequestOutputKind
from jaxpaged.tokenizer import Tokenizer
from tests.fakes import Bench, ScriptRunner, free_talk

pytestmark = pytest.mark.jax

VOCAB = 259
TALK = free_talk(VOCAB, avoid=(0, 1, 2))
PROMPTS = [[10 + key] * length for key, length in enumerate((1, 4, 5, 13, 22, 30))]
NUM_TOKENS = 14
MODES = ("abort", "wait", "keep")


def quiet_answer(prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(TALK(tuple(ids)))
    return ids[len(prompt) :]


class Asked(NamedTuple):
    """What a request wants."""

    prompt: list[int]
    kind: RequestOutputKind


def one_order(bench: Bench, rng: random.Random, asked: dict[str, Asked]) -> None:
    """One thing that a user or an operator may do."""
    control = bench.engine.control
    match rng.choice(("add", "add", "step", "step", "step", "step", "abort", "pause", "resume", "resume", "reset")):
        case "add":
            prompt = rng.choice(PROMPTS)
            kind = rng.choice(list(RequestOutputKind))
            fields = {"n": rng.choice((1, 1, 2, 3)), "max_tokens": NUM_TOKENS, "stream_interval": rng.choice((1, 3))}
            salted = {"prompt_token_ids": prompt, "cache_salt": rng.choice(("ann", "bob"))}
            request_id = bench.add(rng.choice((prompt, salted)), output_kind=kind, **fields)
            asked[request_id] = Asked(prompt, kind)
        case "step":
            bench.step()
        case "abort" if asked:
            bench.abort(rng.choice(list(asked)))
        case "pause":
            bench._take(control.pause(rng.choice(MODES), clear_cache=rng.random() < 0.5))  # type: ignore[arg-type]
            assert not bench.engine.has_step
        case "resume":
            control.resume()
        case "reset":
            control.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
    bench.engine.scheduler.check()


@pytest.mark.parametrize("seed", range(24))
def test_any_order_of_calls_loses_nothing(script_tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    runner = ScriptRunner(TALK, vocab=VOCAB, page_size=4, num_pages=rng.choice((13, 24, 60)), max_num_seqs=3, max_num_batched_tokens=16)
    bench = Bench(runner, script_tokenizer, max_in_flight=rng.choice((1, 2, 3)))
    asked: dict[str, Asked] = {}
    for _ in range(150):
        one_order(bench, rng, asked)
    bench.engine.control.resume()
    bench.run()
    num_whole = 0
    for request_id, (prompt, kind) in asked.items():
        answer, ids_of, reasons = quiet_answer(prompt), dict[int, list[int]](), dict[int, FinishReason | None]()
        for output in bench.outputs[request_id]:
            for completion in output.outputs:
                before = ids_of.get(completion.index, []) if kind is RequestOutputKind.DELTA else []
                ids_of[completion.index] = before + completion.token_ids
                reasons[completion.index] = completion.finish_reason
        for index, ids in ids_of.items():
            assert ids == answer[: len(ids)]
            assert (len(ids) == NUM_TOKENS) == (reasons[index] is FinishReason.LENGTH)
            num_whole += len(ids) == NUM_TOKENS
    assert num_whole > 0
    bench.after_check()
